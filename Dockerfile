# The image of the cluster's programs, for those who build with Docker; "go run ./hack/image" makes it without.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev
RUN CGO_ENABLED=0 go build -trimpath -o /out/ \
    -ldflags "-s -w -X github.com/flux-sandbox/flux-sandbox/internal/version.stamped=${VERSION}" \
    ./cmd/flux-sandbox-controller ./cmd/flux-sandbox-agent ./cmd/flux-sandbox-init ./cmd/flux-sandbox-logger ./cmd/flux-sandbox-hook ./cmd/flux-sandbox-csi ./cmd/fluxctl

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/ /
ENV PATH=/ SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
USER 65532:65532
