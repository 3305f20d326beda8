// Command demoimage writes a small image archive, made of this machine's static busybox, to standard output: for the
// demo and first steps, where no registry can be reached.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"os"

	"github.com/flux-sandbox/flux-sandbox/internal/testimage"
)

func main() {
	name := flag.String("name", "docker.io/library/busybox:latest", "the image's `reference`")
	flag.Parse()
	out := bufio.NewWriter(os.Stdout)
	err := testimage.Write(out, testimage.Options{Name: *name})
	if err == nil {
		err = out.Flush()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demoimage:", err)
		os.Exit(1)
	}
}
