// Package logfile is the on-disk format of a sandbox's output: written by flux-sandbox-logger, one tiny process per
// sandbox that outlives the agent, and read by the agent.
//
// A log is a directory of numbered files, "00000001.log", "00000002.log", and so on. The writer appends to the highest
// number. When a line would make that file too large, the writer first deletes what would be one file too many and
// then begins the next number, so that the directory never holds more than MaxFiles x MaxSize bytes, not even for a
// moment. Files are never renamed: a reader that holds one knows that it is complete as soon as a higher number exists.
//
// Every line has the CRI log format of Kubernetes: time in RFC 3339 with nanoseconds, stream, tag (F for a full line,
// P for a part that continues in the next entry of the same stream), text.
//
// The package depends on the standard library and x/sys alone, as the logger is linked from it.
package logfile

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

const (
	// Stdout and Stderr are the names of the two streams in the log.
	Stdout = "stdout"
	Stderr = "stderr"

	// MaxText is the longest text of one entry in bytes; longer lines are split into parts. 16 KiB is what the CRI
	// implementations use.
	MaxText = 16 << 10
	// MinSize is the smallest permitted size of a log file: it holds the longest entry.
	MinSize = 32 << 10

	suffix = ".log"
)

func fileName(number int) string { return fmt.Sprintf("%08d%s", number, suffix) }

// numbers lists the file numbers in a log directory in ascending order.
func numbers(dir string) ([]int, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var found []int
	for _, e := range entries {
		base, isLog := strings.CutSuffix(e.Name(), suffix)
		if n, err := strconv.Atoi(base); isLog && err == nil && n > 0 && fileName(n) == e.Name() {
			found = append(found, n)
		}
	}
	slices.Sort(found)
	return found, nil
}
