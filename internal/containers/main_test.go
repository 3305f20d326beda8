package containers_test

import (
	"os"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
)

func TestMain(m *testing.M) { os.Exit(containerstest.Main(m)) }
