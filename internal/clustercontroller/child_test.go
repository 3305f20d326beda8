package clustercontroller_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/flux-sandbox/flux-sandbox/internal/clustercontroller"
)

// childEnv has the configuration, in JSON, for a process that is the controller instead of tests, so that it can be killed.
const childEnv = "FLUX_TEST_CONTROLLER_CHILD"

func isChild() bool { return os.Getenv(childEnv) != "" }

func runChild() {
	var config clustercontroller.Config
	err := json.Unmarshal([]byte(os.Getenv(childEnv)), &config)
	if err == nil {
		err = clustercontroller.Run(context.Background(), config, func(string, string) {})
	}
	fmt.Fprintln(os.Stderr, "the controller ended:", err)
	os.Exit(1)
}
