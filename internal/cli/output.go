package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/yaml"
)

// The forms of output.
const (
	outTable = "table"
	outJSON  = "json"
	outYAML  = "yaml"
)

// show prints an object as JSON or YAML, or calls table.
func (a *app) show(object any, table func() error) error {
	switch a.output {
	case outJSON:
		text, err := json.MarshalIndent(object, "", "  ")
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(a.Out, string(text))
		return err
	case outYAML:
		text, err := yaml.Marshal(object)
		if err != nil {
			return err
		}
		_, err = a.Out.Write(text)
		return err
	}
	return table()
}

// table is a table with aligned columns.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer, columns ...string) *table {
	t := &table{w: tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)}
	if len(columns) > 0 {
		t.row(columns...)
	}
	return t
}

// row adds a row; an empty cell is shown as "-".
func (t *table) row(cells ...string) {
	shown := make([]string, len(cells))
	for i, c := range cells {
		if shown[i] = oneLine(c); shown[i] == "" {
			shown[i] = "-"
		}
	}
	// The writer keeps its error for flush.
	_, _ = fmt.Fprintln(t.w, strings.Join(shown, "\t"))
}

func (t *table) flush() error { return t.w.Flush() }

// age is how long ago something was, as kubectl has it: 5m, 3h, 2d.
func (a *app) age(then time.Time) string {
	if then.IsZero() {
		return ""
	}
	return duration.HumanDuration(a.Clock.Since(then))
}

// because joins a reason and a message for a person.
func because(reason, message string) string {
	switch {
	case reason == "":
		return message
	case message == "":
		return reason
	}
	return reason + ": " + message
}

// bytes shows a size in binary units.
func bytes(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%dB", n)
	}
	value, unit := float64(n)/1024, 0
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0") + units[unit:unit+1] + "i"
}
