package testenv

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		looks := 0
		if !Poll(time.Minute, func() bool { looks++; return time.Since(began) >= 10*time.Second }) || time.Since(began) > 11*time.Second {
			t.Errorf("what holds after 10 s was seen after %s", time.Since(began))
		}
		if most := int(10 * time.Second / nextLooks * 2); looks > most {
			t.Errorf("%d looks, want %d at most", looks, most)
		}
		began = time.Now()
		if Poll(time.Minute, func() bool { return false }) || time.Since(began) != time.Minute {
			t.Errorf("what never holds was given up after %s", time.Since(began))
		}
		if !Poll(0, func() bool { return true }) {
			t.Error("what holds already is not seen without patience")
		}
	})
}
