package grpcapi

import (
	"encoding/base64"
)

// pageSize reads a page size: the default when zero, at most the maximum.
func pageSize(asked int32, normal, most int) (int, error) {
	switch {
	case asked < 0:
		return 0, invalid("page_size %d is negative: set 0 for the default of %d, or a positive number", asked, normal)
	case asked == 0:
		return normal, nil
	}
	return min(int(asked), most), nil
}

// encodeToken makes a page token of the key of a page's last element.
func encodeToken(last string) string {
	return base64.RawURLEncoding.EncodeToString([]byte("v1" + last))
}

// decodeToken is the reverse of encodeToken; empty for the first page.
func decodeToken(token string) (string, error) {
	if token == "" {
		return "", nil
	}
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(b) < 3 || string(b[:2]) != "v1" {
		return "", invalid("page_token %q is none that a list returned: begin again without it", token)
	}
	return string(b[2:]), nil
}
