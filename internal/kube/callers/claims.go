package callers

import (
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
)

// claims is what a token says of itself (RFC 7519, sections 4.1.3 and 4.1.4), verified by nobody.
type claims struct {
	Audience audiences `json:"aud"`
	// Expires is in seconds since 1970; nil if the token does not say.
	Expires *float64 `json:"exp"`
}

// audiences are a list, or a single word.
type audiences []string

func (a *audiences) UnmarshalJSON(text []byte) error {
	var one string
	if json.Unmarshal(text, &one) == nil {
		*a = audiences{one}
		return nil
	}
	return json.Unmarshal(text, (*[]string)(a))
}

// claimsOf reads the claims of a JWT; none of a token that is something else.
func claimsOf(token string) claims {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return claims{}
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return claims{}
	}
	var c claims
	if json.Unmarshal(text, &c) != nil {
		return claims{}
	}
	return c
}

func (c claims) meantFor(audience string) bool { return slices.Contains(c.Audience, audience) }
