package patch

import (
	"maps"
	"reflect"
	"slices"
	"strconv"
)

// differ collects the operations of one patch.
type differ struct {
	raw        []byte
	guard, ops Patch
}

// known says whether there is a stored document to look at.
func (d *differ) known() bool { return d.raw != nil }

// value compares two values that exist in both states. raw is the stored one: nil when it is missing, or
// when the stored document is not known.
func (d *differ) value(at location, old, new, raw any) {
	switch new := new.(type) {
	case map[string]any:
		if old, ok := old.(map[string]any); ok && d.editable(old, raw) {
			d.object(at, old, new, raw)
			return
		}
	case []any:
		if key, ok := listKeys[at.pattern]; ok {
			if old, ok := old.([]any); ok && d.keyedList(at, key, old, new, raw) {
				return
			}
		}
	}
	if !reflect.DeepEqual(old, new) {
		d.set(at, new)
	}
}

// editable says whether operations below an object will find it in the stored document.
func (d *differ) editable(old map[string]any, raw any) bool {
	if d.known() {
		_, ok := raw.(map[string]any)
		return ok
	}
	return !hollow(old)
}

// hollow says that Go would write the object like this also when it is missing: structs in structs, with
// nothing in them.
func hollow(object map[string]any) bool {
	for _, member := range object {
		if m, ok := member.(map[string]any); !ok || !hollow(m) {
			return false
		}
	}
	return true
}

// set writes a value whether or not there is one: "add" to a member replaces it (RFC 6902, 4.1).
func (d *differ) set(at location, value any) {
	d.ops = append(d.ops, Operation{Op: "add", Path: at.pointer, Value: value})
}

func (d *differ) remove(at location) {
	d.ops = append(d.ops, Operation{Op: "remove", Path: at.pointer})
}

func (d *differ) move(from, to location) {
	d.ops = append(d.ops, Operation{Op: "move", From: from.pointer, Path: to.pointer})
}

// object compares two objects member by member, in the order of their names.
func (d *differ) object(at location, old, new map[string]any, raw any) {
	stored, _ := raw.(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(old)) {
		if _, stays := new[name]; stays {
			continue
		}
		if _, ok := stored[name]; ok || !d.known() {
			d.remove(at.member(name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(new)) {
		if was, ok := old[name]; ok {
			d.value(at.member(name), was, new[name], stored[name])
		} else {
			d.set(at.member(name), new[name])
		}
	}
}

// keyedList compares two lists by the keys of their entries. It returns false, having done nothing, when
// that cannot be done: an entry has no key, a key comes twice, or the stored list has other entries than
// the old one.
func (d *differ) keyedList(at location, key string, old, new []any, raw any) bool {
	oldKeys, ok := keysOf(old, key)
	if !ok {
		return false
	}
	newKeys, ok := keysOf(new, key)
	if !ok {
		return false
	}
	stored, _ := raw.([]any)
	if d.known() {
		if storedKeys, ok := keysOf(stored, key); !ok || !slices.Equal(storedKeys, oldKeys) {
			return false
		}
	}

	edit := listEdit{differ: d, at: at, key: key, keys: oldKeys}
	for i := len(oldKeys) - 1; i >= 0; i-- { // from the end: the indices before it stay as they are
		if !slices.Contains(newKeys, oldKeys[i]) {
			edit.remove(i)
		}
	}
	for i, k := range newKeys {
		switch was := slices.Index(oldKeys, k); {
		case was < 0:
			edit.insert(i, k, new[i])
		case edit.keys[i] != k:
			edit.move(slices.Index(edit.keys, k), i)
		}
	}
	// Now every entry is at its final index, and the edits cannot disturb each other.
	for i, k := range newKeys {
		was := slices.Index(oldKeys, k)
		if was < 0 {
			continue
		}
		var rawEntry any
		if d.known() {
			rawEntry = stored[was]
		}
		before := len(d.ops)
		d.value(edit.entry(i), old[was], new[i], rawEntry)
		if len(d.ops) > before {
			d.ops = slices.Insert(d.ops, before, edit.test(i))
		}
	}
	return true
}

// listEdit follows the keys of a list while operations on it are written down.
type listEdit struct {
	*differ
	at   location
	key  string
	keys []string // by index, after the operations so far
}

func (e *listEdit) entry(i int) location { return e.at.index(strconv.Itoa(i)) }

func (e *listEdit) test(i int) Operation {
	return Operation{Op: "test", Path: e.entry(i).member(e.key).pointer, Value: e.keys[i]}
}

func (e *listEdit) remove(i int) {
	e.ops = append(e.ops, e.test(i))
	e.differ.remove(e.entry(i))
	e.keys = slices.Delete(slices.Clone(e.keys), i, i+1)
}

func (e *listEdit) insert(i int, key string, value any) {
	e.set(e.entry(i), value)
	e.keys = slices.Insert(slices.Clone(e.keys), i, key)
}

func (e *listEdit) move(from, to int) {
	k := e.keys[from]
	e.ops = append(e.ops, e.test(from))
	e.differ.move(e.entry(from), e.entry(to))
	e.keys = slices.Insert(slices.Delete(slices.Clone(e.keys), from, from+1), to, k)
}
