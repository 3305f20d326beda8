package embedded

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"syscall"

	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// format is the format of the file that this build writes, and the highest that it reads.
const format = 1

var (
	metaBucket = []byte("meta")
	formatKey  = []byte("format")  // decimal
	versionKey = []byte("version") // what no resourceVersion is higher than that was ever shown, decimal
	epochKey   = []byte("epoch")   // decimal
)

// openFile opens the file, takes its lock and makes its buckets when it is new.
func openFile(path string, options Options) (*bolt.DB, error) {
	info, err := os.Stat(path)
	isNew := errors.Is(err, os.ErrNotExist)
	if err != nil && !isNew {
		return nil, fmt.Errorf("open the state file: %w", err)
	}
	if !isNew && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("open the state file %s: it is not a regular file: %w", path, errdefs.ErrInvalidArgument)
	}
	if !isNew && info.Size() > 0 {
		if err := checkLength(path, options); err != nil {
			return nil, err
		}
	}
	var file *bolt.DB
	err = onFile(path, func() (err error) {
		file, err = bolt.Open(path, 0o600, &bolt.Options{
			Timeout:      options.LockTimeout,
			FreelistType: bolt.FreelistMapType,
			MaxSize:      options.maxFileBytes,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	if isNew {
		err = syncDirectory(filepath.Dir(path))
	}
	if err == nil {
		err = onFile(path, func() error { return prepare(file) })
	}
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

// checkLength refuses a file that was cut short. bbolt maps the file, and to read a page that is not there
// would end the process.
func checkLength(path string, options Options) error {
	return onFile(path, func() error {
		file, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: options.LockTimeout})
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		return file.View(func(tx *bolt.Tx) error {
			info, err := os.Stat(path)
			if err != nil {
				return err
			}
			if info.Size() < tx.Size() {
				return fmt.Errorf("it was cut short: it has %d bytes of %d", info.Size(), tx.Size())
			}
			return nil
		})
	})
}

// prepare checks the format of the file, and makes what is missing in a new one.
func prepare(file *bolt.DB) error {
	isNew := true
	err := file.View(func(tx *bolt.Tx) error {
		meta := tx.Bucket(metaBucket)
		if meta == nil {
			first, _ := tx.Cursor().First()
			if isNew = first == nil; !isNew {
				return errors.New("it is a database of some other program")
			}
			return nil
		}
		isNew = false
		have, err := parseNumber(meta.Get(formatKey))
		switch {
		case err != nil || have == 0:
			return fmt.Errorf("its format is %q, which is no number greater than 0", meta.Get(formatKey))
		case have > format:
			return fault.New(errdefs.ErrFailedPrecondition, fault.VersionSkew,
				"the state file %s has format %d, and this build reads formats up to %d: start the newer build again; the file was not changed",
				file.Path(), have, format)
		}
		for _, name := range [][]byte{sandboxKind.bucket, groupKind.bucket} {
			if tx.Bucket(name) == nil {
				return fmt.Errorf("its bucket %q is missing", name)
			}
		}
		return nil
	})
	if err != nil || !isNew {
		return err
	}
	return file.Update(func(tx *bolt.Tx) error {
		for _, name := range [][]byte{metaBucket, sandboxKind.bucket, groupKind.bucket} {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		return tx.Bucket(metaBucket).Put(formatKey, strconv.AppendInt(nil, format, 10))
	})
}

// load reads everything into memory. It names every object that cannot be read.
func (s *Store) load() error {
	return s.file.View(func(tx *bolt.Tx) error {
		meta := tx.Bucket(metaBucket)
		version, err := parseNumber(meta.Get(versionKey))
		if err != nil {
			return fmt.Errorf("its resource version: %w", err)
		}
		epoch, err := parseNumber(meta.Get(epochKey))
		if err != nil {
			return fmt.Errorf("its epoch: %w", err)
		}
		s.epoch = int64(epoch)
		s.version.Store(version)
		s.reserved = version
		return errors.Join(
			s.sandboxes.load(tx.Bucket(s.sandboxes.kind.bucket)),
			s.groups.load(tx.Bucket(s.groups.kind.bucket)),
		)
	})
}

// onFile calls f, which reads the file, and says of its errors what file that is and what can be done. A
// damaged file makes bbolt panic, and a bad block of the disk makes the map fault: both become errors.
func onFile(path string, f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = damaged(path, fmt.Errorf("%v", p))
		}
	}()
	err = f()
	var known *fault.Error
	var system syscall.Errno
	switch {
	case err == nil, errors.As(err, &known):
		return err
	case errors.Is(err, bolterrors.ErrTimeout):
		return fault.New(errdefs.ErrUnavailable, store.Unavailable,
			"the state file %s is in use by another process: is a server running already? Stop it, or use another state directory", path)
	case errors.As(err, &system):
		return fmt.Errorf("open the state file %s: %w", path, err)
	}
	return damaged(path, err)
}

func damaged(path string, cause error) error {
	return fault.New(errdefs.ErrDataLoss, fault.Internal,
		"the state file %s cannot be read: %w (it was left as it is: restore it from a backup, or move it away to start with no objects)", path, cause)
}

// syncDirectory makes the name of a new file durable.
func syncDirectory(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("sync the state directory: %w", err)
	}
	defer func() { _ = dir.Close() }()
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("sync the state directory: %w", err)
	}
	return nil
}
