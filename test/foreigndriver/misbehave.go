package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// lookEvery is how often a call that hangs looks whether it still has to.
const lookEvery = 100 * time.Millisecond

// ofVolume are the requests that are about a volume.
type ofVolume interface{ GetVolumeId() string }

// intercept notes each call for a volume, lets one at a time go on, and does what it is told to do wrong.
func (d *driver) intercept(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	of, ok := request.(ofVolume)
	if !ok {
		return handler(ctx, request)
	}
	call, volume := path.Base(info.FullMethod), of.GetVolumeId()
	// Targets of one volume are apart, as kubelet's operations are.
	key := volume
	if at, ok := request.(interface{ GetTargetPath() string }); ok {
		key += " " + at.GetTargetPath()
	}
	d.note(volume, "begin "+call)
	response, err := d.alone(key, func() (any, error) {
		if err := d.misbehave(volume, call); err != nil {
			return nil, err
		}
		return handler(ctx, request)
	})
	d.note(volume, "end "+call+" "+status.Code(err).String())
	slog.Info("called", "call", call, "volume", volume, "error", err)
	return response, err
}

// alone carries out a call unless another of the same is under way.
func (d *driver) alone(key string, do func() (any, error)) (any, error) {
	d.mu.Lock()
	if d.busy == nil {
		d.busy = map[string]bool{}
	}
	busy := d.busy[key]
	d.busy[key] = true
	d.mu.Unlock()
	if busy {
		return nil, status.Errorf(codes.Aborted, "a call for %s is under way", key)
	}
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.busy, key)
	}()
	return do()
}

// note adds a line to what was called of a volume.
func (d *driver) note(volume, line string) {
	f, err := os.OpenFile(d.file(volume, "calls"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err == nil {
		_, err = fmt.Fprintln(f, line)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		slog.Warn("a call could not be noted", "line", line, "error", err)
	}
}

// orders are the words of the lines about a call.
func (d *driver) orders(volume, call string) [][]string {
	text, err := os.ReadFile(d.file(volume, "misbehave"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		slog.Warn("what to do wrong could not be read", "volume", volume, "error", err)
	}
	var out [][]string
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == call {
			out = append(out, words[1:])
		}
	}
	return out
}

// misbehaves says whether a call is to be answered in one of the wrong ways.
func (d *driver) misbehaves(volume, call, how string) bool {
	return slices.ContainsFunc(d.orders(volume, call), func(words []string) bool { return words[0] == how })
}

// misbehave does what is to be done wrong before a call is carried out.
func (d *driver) misbehave(volume, call string) error {
	for _, words := range d.orders(volume, call) {
		switch {
		case words[0] == "slow" && len(words) == 2:
			wait, err := time.ParseDuration(words[1])
			if err != nil {
				return err
			}
			<-time.After(wait)
		case words[0] == "fail" && len(words) == 3:
			if err := d.fail(volume+" "+call+" "+strings.Join(words, " "), words[1], words[2]); err != nil {
				return err
			}
		case words[0] == "hang":
			tick := time.NewTicker(lookEvery)
			for d.misbehaves(volume, call, "hang") {
				<-tick.C
			}
			tick.Stop()
		}
	}
	return nil
}

// fail is an error for the first most calls.
func (d *driver) fail(key, code, most string) error {
	n, err := strconv.Atoi(most)
	if err != nil {
		return err
	}
	var c codes.Code
	if err := c.UnmarshalJSON([]byte(`"` + constant(code) + `"`)); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed == nil {
		d.failed = map[string]int{}
	}
	if d.failed[key] >= n {
		return nil
	}
	d.failed[key]++
	return status.Errorf(c, "told to fail, for the %d. time of %d", d.failed[key], n)
}

// constant is a code's name as the protocol writes it: DEADLINE_EXCEEDED for DeadlineExceeded.
func constant(name string) string {
	var b strings.Builder
	for i, r := range name {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
		}
		b.WriteRune(r)
	}
	return strings.ToUpper(b.String())
}
