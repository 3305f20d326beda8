// Testsummary makes a run of tests readable and counts it.
//
// It reads the output of "go test -json" and prints a line per package, and everything that a failed test
// wrote. Several runs add up in a tally file, from which the closing lines are made:
//
//	go test -json ./internal/... | testsummary -tally FILE
//	testsummary -tally FILE -close        # prints what failed tests said, in short, and "N passed, N failed"
//
// A test that has subtests is not counted beside them. A package that fails without a failed test (it does
// not build, it panics in TestMain, it exceeds its time) counts as one failure. Skipped tests are named with
// their reason; with CI=true each is a failure, as nothing may be missing there.
//
// Exit status: 0 if nothing failed, 1 otherwise.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
)

func main() {
	tallyFile := flag.String("tally", "", "`file` in which the counts of several runs add up")
	closing := flag.Bool("close", false, "read no tests; print the closing lines of the tally")
	flag.Parse()

	var total Run
	if err := load(*tallyFile, &total); err != nil {
		fmt.Fprintln(os.Stderr, "testsummary:", err)
		os.Exit(1)
	}
	failed := false
	if *closing {
		for _, c := range total.Complaints {
			fmt.Println(c)
		}
		fmt.Println(total.Counts)
		failed = total.Failed > 0
	} else {
		run := Summarise(os.Stdin, os.Stdout, os.Getenv("CI") == "true")
		failed = run.Failed > 0
		total.Add(run)
		if err := save(*tallyFile, total); err != nil {
			fmt.Fprintln(os.Stderr, "testsummary:", err)
			os.Exit(1)
		}
	}
	if failed {
		os.Exit(1)
	}
}

// load reads the run kept in file; none yet is zero.
func load(file string, r *Run) error {
	if file == "" {
		return nil
	}
	f, err := os.Open(file)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if err := json.NewDecoder(f).Decode(r); err != nil && err != io.EOF {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

func save(file string, r Run) error {
	if file == "" {
		return nil
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(file, b, 0o644)
}
