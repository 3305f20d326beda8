package patch

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"k8s.io/apimachinery/pkg/types"
)

// Operation is one step of a JSON Patch (RFC 6902, section 4).
type Operation struct {
	// Op is test, add, remove or move.
	Op string
	// From is the source of a move.
	From string
	// Path is a JSON pointer (RFC 6901).
	Path string
	// Value is that of a test or an add: anything that encodes as JSON.
	Value any
}

// MarshalJSON writes the members that the operation's kind has, and no other.
func (o Operation) MarshalJSON() ([]byte, error) {
	switch o.Op {
	case "remove":
		return json.Marshal(struct {
			Op   string `json:"op"`
			Path string `json:"path"`
		}{o.Op, o.Path})
	case "move":
		return json.Marshal(struct {
			Op   string `json:"op"`
			From string `json:"from"`
			Path string `json:"path"`
		}{o.Op, o.From, o.Path})
	}
	return json.Marshal(struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value any    `json:"value"`
	}{o.Op, o.Path, o.Value})
}

// Patch is a JSON Patch. An empty one changes nothing.
type Patch []Operation

// Touches says whether the patch changes something at or below a JSON pointer.
func (p Patch) Touches(pointer string) bool {
	for _, o := range p {
		if o.Op != "test" && (o.Path == pointer || strings.HasPrefix(o.Path, pointer+"/")) {
			return true
		}
	}
	return false
}

// Apply applies the patch to a document and returns the result; the argument is left as it is. It fails
// when a test does not hold or a path does not exist.
func (p Patch) Apply(raw []byte) ([]byte, error) {
	data, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encode a JSON patch: %w", err)
	}
	return Apply(raw, data)
}

// Option is an option of Make and Diff.
type Option func(*differ)

// WithRaw gives the stored JSON that old was decoded from. The patch then fits it exactly.
func WithRaw(raw []byte) Option { return func(d *differ) { d.raw = raw } }

// WithGuard makes the patch fail unless the object still has this UID and resourceVersion. Either may
// be empty: then it is not tested. An empty patch stays empty.
func WithGuard(uid types.UID, resourceVersion string) Option {
	return func(d *differ) {
		if uid != "" {
			d.guard = append(d.guard, Operation{Op: "test", Path: "/metadata/uid", Value: string(uid)})
		}
		if resourceVersion != "" {
			d.guard = append(d.guard, Operation{Op: "test", Path: "/metadata/resourceVersion", Value: resourceVersion})
		}
	}
}

// Make computes the patch that turns the stored form of old into that of new. Both are values that encode
// as JSON objects, of the same type.
func Make(old, new any, options ...Option) (Patch, error) {
	var d differ
	for _, o := range options {
		o(&d)
	}
	from, err := tree(old)
	if err != nil {
		return nil, fmt.Errorf("compute a patch: the old object: %w", err)
	}
	to, err := tree(new)
	if err != nil {
		return nil, fmt.Errorf("compute a patch: the new object: %w", err)
	}
	var raw any
	if d.raw != nil {
		if raw, err = parse(d.raw); err != nil {
			return nil, fmt.Errorf("compute a patch: the stored object: %w", err)
		}
		if _, ok := raw.(map[string]any); !ok {
			return nil, fmt.Errorf("compute a patch: the stored value is not a JSON object")
		}
	}
	d.object(location{}, from, to, raw)
	if len(d.ops) == 0 {
		return nil, nil
	}
	return append(d.guard, d.ops...), nil
}

// Diff is Make, encoded for the wire. It is nil when nothing changed.
func Diff(old, new any, options ...Option) ([]byte, error) {
	p, err := Make(old, new, options...)
	if err != nil || len(p) == 0 {
		return nil, err
	}
	return json.Marshal(p)
}

// Apply applies an encoded patch to a document, as Patch.Apply does.
func Apply(raw, patch []byte) ([]byte, error) {
	p, err := jsonpatch.DecodePatch(patch)
	if err != nil {
		return nil, fmt.Errorf("decode a JSON patch: %w", err)
	}
	out, err := p.Apply(raw)
	if err != nil {
		return nil, fmt.Errorf("apply a JSON patch: %w", err)
	}
	return out, nil
}

// Equal says whether two JSON documents say the same: the order of members does not count, nor members that are null.
func Equal(a, b []byte) bool {
	x, err := parse(a)
	if err != nil {
		return false
	}
	y, err := parse(b)
	return err == nil && reflect.DeepEqual(x, y)
}

// tree is the decoded JSON of a typed object.
func tree(v any) (map[string]any, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	t, err := parse(data)
	if err != nil {
		return nil, err
	}
	object, ok := t.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%T is not a JSON object", v)
	}
	return object, nil
}

// parse decodes JSON with numbers as they are written, so that large ones are not rounded, and leaves
// out members that are null.
func parse(data []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	dropNulls(v)
	return v, nil
}

func dropNulls(v any) {
	switch v := v.(type) {
	case map[string]any:
		for k, member := range v {
			if member == nil {
				delete(v, k)
				continue
			}
			dropNulls(member)
		}
	case []any:
		for _, entry := range v {
			dropNulls(entry)
		}
	}
}
