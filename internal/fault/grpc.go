package fault

import (
	"context"
	"errors"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
)

// kinds pairs each kind with its gRPC code. Where two kinds share a code, the first is what a caller gets
// back.
var kinds = []struct {
	kind error
	code codes.Code
}{
	{errdefs.ErrInvalidArgument, codes.InvalidArgument},
	{errdefs.ErrNotFound, codes.NotFound},
	{errdefs.ErrAlreadyExists, codes.AlreadyExists},
	{errdefs.ErrFailedPrecondition, codes.FailedPrecondition},
	{errdefs.ErrPermissionDenied, codes.PermissionDenied},
	{errdefs.ErrUnauthenticated, codes.Unauthenticated},
	{errdefs.ErrResourceExhausted, codes.ResourceExhausted},
	{errdefs.ErrOutOfRange, codes.OutOfRange},
	{errdefs.ErrNotImplemented, codes.Unimplemented},
	{errdefs.ErrAborted, codes.Aborted},
	{errdefs.ErrConflict, codes.Aborted},
	{errdefs.ErrUnavailable, codes.Unavailable},
	{errdefs.ErrDataLoss, codes.DataLoss},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
	{errdefs.ErrInternal, codes.Internal},
}

// ToGRPC is the one place that makes a gRPC status of an error: the code from its kind, the message as it
// is, and a google.rpc.ErrorInfo with the reason and the metadata, followed by details. Nil stays nil, and
// an error that is a status already is left as it is.
func ToGRPC(err error, details ...protoadapt.MessageV1) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	code := codes.Internal
	for _, k := range kinds {
		if errors.Is(err, k.kind) {
			code = k.code
			break
		}
	}
	// What is no UTF-8, such as a path from inside a sandbox, would cost the whole answer.
	message := valid(err.Error())
	info := &errdetails.ErrorInfo{Reason: string(ReasonOf(err)), Domain: Domain, Metadata: MetadataOf(err)}
	for k, v := range info.Metadata {
		info.Metadata[k] = valid(v)
	}
	st, detailErr := status.New(code, message).WithDetails(append([]protoadapt.MessageV1{info}, details...)...)
	if detailErr != nil {
		return status.Error(code, message)
	}
	return st.Err()
}

func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// FromGRPC is the reverse of ToGRPC, for a caller: the same kind, reason, message and metadata. An error
// that carries no ErrorInfo of our domain keeps its kind; nil stays nil.
func FromGRPC(err error) error {
	st, ok := status.FromError(err)
	if err == nil || !ok {
		return err
	}
	e := &Error{Kind: errdefs.ErrUnknown, Message: st.Message()}
	for _, k := range kinds {
		if k.code == st.Code() {
			e.Kind = k.kind
			break
		}
	}
	e.Reason = ReasonOf(e.Kind)
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == Domain {
			e.Reason, e.Metadata = Reason(info.GetReason()), info.GetMetadata()
		}
	}
	return e
}

// Details are the details of type T that a gRPC status carries.
func Details[T any](err error) []T {
	var out []T
	for _, d := range status.Convert(err).Details() {
		if v, ok := d.(T); ok {
			out = append(out, v)
		}
	}
	return out
}
