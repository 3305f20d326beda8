package journal

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"hash/crc32"
)

// The head of a record: length, checksum and a checksum of both, each as eight hexadecimal digits and a space.
const (
	fieldSize = 9
	headSize  = 3 * fieldSize
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var (
	// errTorn: the data is the beginning of a record whose writing was cut off.
	errTorn = errors.New("a record is cut off")
	// errHead and errBody: a record is there and is not what was written.
	errHead = errors.New("the head of a record does not fit its checksum")
	errBody = errors.New("a record does not fit its checksum")
)

// appendFrame appends a value as one record.
func appendFrame(to []byte, v any) ([]byte, error) {
	start := len(to)
	buffer := bytes.NewBuffer(append(to, make([]byte, headSize)...))
	if err := json.NewEncoder(buffer).Encode(v); err != nil { // ends it with a newline
		return to, err
	}
	b := buffer.Bytes()
	seal(b[start:])
	return b, nil
}

// seal writes the head of a record, for which there is space before its body.
func seal(record []byte) {
	head, body := record[:headSize], record[headSize:]
	putField(head, uint32(len(body)))
	putField(head[fieldSize:], crc32.Checksum(body, castagnoli))
	putField(head[2*fieldSize:], crc32.Checksum(head[:2*fieldSize], castagnoli))
}

func putField(to []byte, n uint32) {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], n)
	hex.Encode(to, b[:])
	to[fieldSize-1] = ' '
}

// isField says whether a field is n, written as putField does.
func isField(field []byte, n uint32) bool {
	var want [fieldSize]byte
	putField(want[:], n)
	return bytes.Equal(field, want[:])
}

// firstFrame takes the first record off the data. The error is errTorn, errHead or errBody.
func firstFrame(data []byte) (body, rest []byte, err error) {
	if len(data) < headSize {
		return nil, nil, errTorn
	}
	head := data[:headSize]
	if !isField(head[2*fieldSize:], crc32.Checksum(head[:2*fieldSize], castagnoli)) {
		return nil, nil, errHead
	}
	var length [4]byte
	if _, err := hex.Decode(length[:], head[:fieldSize-1]); err != nil {
		return nil, nil, errHead
	}
	size := int(binary.BigEndian.Uint32(length[:]))
	if data = data[headSize:]; len(data) < size {
		return nil, nil, errTorn
	}
	body = data[:size]
	if !isField(head[fieldSize:2*fieldSize], crc32.Checksum(body, castagnoli)) {
		return nil, nil, errBody
	}
	return body, data[size:], nil
}
