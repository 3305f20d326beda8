package patch

import "strings"

// listKeys has the lists that are compared by key: path (with * for any index), and the key's member. It
// mirrors the +listMapKey markers of the API types; ownerReferences are keyed by Kubernetes.
var listKeys = map[string]string{
	"/metadata/ownerReferences":                   "uid",
	"/spec/volumeMounts":                          "target",
	"/spec/dynamicVolumes":                        "target",
	"/spec/env":                                   "name",
	"/spec/resources/claims":                      "name",
	"/spec/subGroups":                             "name",
	"/spec/subGroups/*/template/env":              "name",
	"/spec/subGroups/*/template/resources/claims": "name",
	"/status/conditions":                          "type",
	"/status/volumes":                             "target",
	"/status/volumeMounts":                        "target",
}

// location is a place in a document: its JSON pointer, and its pattern in the sense of listKeys.
type location struct{ pointer, pattern string }

var escape = strings.NewReplacer("~", "~0", "/", "~1")

func (l location) member(name string) location {
	e := escape.Replace(name)
	return location{l.pointer + "/" + e, l.pattern + "/" + e}
}

func (l location) index(i string) location {
	return location{l.pointer + "/" + i, l.pattern + "/*"}
}

// keysOf are the keys of a list's entries, in order; ok is false unless each entry is an object with a
// key of its own.
func keysOf(list []any, key string) (keys []string, ok bool) {
	keys = make([]string, len(list))
	seen := make(map[string]bool, len(list))
	for i, entry := range list {
		object, _ := entry.(map[string]any)
		k, isString := object[key].(string)
		if !isString || seen[k] {
			return nil, false
		}
		seen[k] = true
		keys[i] = k
	}
	return keys, true
}
