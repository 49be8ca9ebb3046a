#include "schema/file_pieces.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace gpupool::schema {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;

kj::Promise<void> sendFrom(kj::Timer& timer, kj::AsyncOutputStream& to, int file, uint64_t offset,
                           uint64_t end, kj::Duration bound) {
  if (offset == end) return kj::READY_NOW;
  auto piece = kj::heapArray<kj::byte>(std::min<uint64_t>(kPieceBytes, end - offset));
  const ssize_t got = ::pread(file, piece.begin(), piece.size(), static_cast<off_t>(offset));
  if (got != static_cast<ssize_t>(piece.size()))
    return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str("a file cannot be read"));
  auto written = to.write(piece.begin(), piece.size());
  const uint64_t next = offset + piece.size();
  return timer.timeoutAfter(bound, kj::mv(written))
      .attach(kj::mv(piece))
      .then([&timer, &to, file, next, end, bound] { return sendFrom(timer, to, file, next, end, bound); });
}

kj::Promise<std::string> receiveFrom(kj::Timer& timer, kj::AsyncInputStream& from, int file, uint64_t offset,
                                     uint64_t end, kj::Duration bound, std::string why) {
  if (offset == end) return why;
  auto piece = kj::heapArray<kj::byte>(std::min<uint64_t>(kPieceBytes, end - offset));
  auto read = from.read(piece.begin(), piece.size());
  return timer.timeoutAfter(bound, kj::mv(read))
      .then([&timer, &from, file, offset, end, bound, why = std::move(why), piece = kj::mv(piece)]() mutable {
        if (why.empty() && file >= 0) {
          const ssize_t put = ::pwrite(file, piece.begin(), piece.size(), static_cast<off_t>(offset));
          if (put != static_cast<ssize_t>(piece.size())) why = std::strerror(put < 0 ? errno : ENOSPC);
        }
        return receiveFrom(timer, from, file, offset + piece.size(), end, bound, std::move(why));
      });
}

}  // namespace

kj::Promise<void> sendPieces(kj::Timer& timer, kj::AsyncOutputStream& to, int file, uint64_t offset,
                             uint64_t bytes, kj::Duration bound) {
  return sendFrom(timer, to, file, offset, offset + bytes, bound);
}

kj::Promise<std::string> receivePieces(kj::Timer& timer, kj::AsyncInputStream& from, int file,
                                       uint64_t offset, uint64_t bytes, kj::Duration bound) {
  return receiveFrom(timer, from, file, offset, offset + bytes, bound, "");
}

}  // namespace gpupool::schema
