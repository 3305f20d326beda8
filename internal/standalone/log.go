package standalone

import (
	"log/slog"
	"os"
)

func newLogger(c LogConfig) (*slog.Logger, error) {
	level := slog.LevelInfo
	if c.Level != "" {
		if err := level.UnmarshalText([]byte(c.Level)); err != nil {
			return nil, invalid("log.level %q: must be debug, info, warn or error", c.Level)
		}
	}
	options := &slog.HandlerOptions{Level: level}
	switch c.Format {
	case "", "text":
		return slog.New(slog.NewTextHandler(os.Stderr, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(os.Stderr, options)), nil
	}
	return nil, invalid("log.format %q: must be text or json", c.Format)
}
