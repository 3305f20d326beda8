package store

import (
	"encoding/base64"
	"iter"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
)

// Pick is Reader.List for backends that have all objects in memory. all calls its argument with them, while nobody
// changes them; they are copied when it has returned.
func Pick[T Object](options ListOptions, all func(func(iter.Seq[T]))) (Page[T], error) {
	var page Page[T]
	after, err := decodeContinue(options.Continue)
	if err != nil {
		return page, err
	}
	all(func(objects iter.Seq[T]) {
		for o := range objects {
			if options.has(o) && compareKeys(KeyOf(o), after) > 0 {
				page.Items = append(page.Items, o)
			}
		}
	})
	slices.SortFunc(page.Items, func(a, b T) int { return compareKeys(KeyOf(a), KeyOf(b)) })
	if options.Limit > 0 && len(page.Items) > options.Limit {
		page.Items = page.Items[:options.Limit]
		page.Continue = After(page.Items[len(page.Items)-1])
	}
	for i, o := range page.Items {
		page.Items[i] = o.DeepCopyObject().(T)
	}
	return page, nil
}

func (options ListOptions) has(o Object) bool {
	return (options.Namespace == "" || options.Namespace == o.GetNamespace()) &&
		(options.Labels == nil || options.Labels.Matches(labels.Set(o.GetLabels())))
}

func compareKeys(a, b Key) int {
	if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
		return c
	}
	return strings.Compare(a.Name, b.Name)
}

// After is the ListOptions.Continue of a page that ends with an object, for who cuts a page short.
func After(last Object) string {
	return base64.RawURLEncoding.EncodeToString([]byte(KeyOf(last).String()))
}

func decodeContinue(token string) (Key, error) {
	if token == "" {
		return Key{}, nil
	}
	text, err := base64.RawURLEncoding.DecodeString(token)
	namespace, name, ok := strings.Cut(string(text), "/")
	if err != nil || !ok {
		return Key{}, BadContinue(token)
	}
	return Key{Namespace: namespace, Name: name}, nil
}
