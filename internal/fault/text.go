package fault

import "strings"

// maxText is the most bytes of a message in a status: what more there is is of no use to a person, and the API server takes no
// more than 32 KiB in a condition, without which the whole status would not be written.
const maxText = 4 << 10

// Text is a message as a status has it. An answer of the API server quotes what it refuses, however long that is.
func Text(message string) string {
	if len(message) <= maxText {
		return message
	}
	const cut = " [...] "
	half := (maxText - len(cut)) / 2
	return strings.ToValidUTF8(message[:half], "") + cut + strings.ToValidUTF8(message[len(message)-half:], "")
}
