package containers

import "fmt"

// errorf says what failed in front of err; nil stays nil.
func errorf(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}
