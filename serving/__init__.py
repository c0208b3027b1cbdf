"""The gRPC generate service around the k3jax engine; the only package that imports grpc."""
