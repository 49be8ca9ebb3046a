#pragma once
// A stream whose first byte is known before who serves it is.

#include <kj/async-io.h>

namespace gpupool::pool {

struct Peeked {
  kj::Own<kj::AsyncIoStream> stream;  // begins with `first`; null: the peer closed it before
  kj::byte first = 0;
};

kj::Promise<Peeked> peek(kj::Own<kj::AsyncIoStream> stream);

}  // namespace gpupool::pool
