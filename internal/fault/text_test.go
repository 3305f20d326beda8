package fault

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTextKeepsBothEnds(t *testing.T) {
	if m := strings.Repeat("x", maxText); Text(m) != m {
		t.Error("a message that fits was changed")
	}
	m := "the Pod is refused: " + strings.Repeat("\u00e4", maxText) + ": must be no more than 63 bytes"
	got := Text(m)
	if len(got) > maxText || !utf8.ValidString(got) || !strings.HasPrefix(got, "the Pod is refused: ") || !strings.HasSuffix(got, ": must be no more than 63 bytes") ||
		!strings.Contains(got, " [...] ") {
		t.Errorf("%d bytes: %s", len(got), got)
	}
}
