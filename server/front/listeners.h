#pragma once
// The sockets on which sessions arrive, and who is behind a connection. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <string>

namespace gpupool::server {

// A Unix socket at `path`, for every user of the host (the session key decides). A socket left by a dead
// server is replaced; one that answers is not. Throws kj::Exception. The file goes away with the object.
class LocalListener {
 public:
  LocalListener(kj::LowLevelAsyncIoProvider& io, const std::string& path);
  ~LocalListener() noexcept;
  KJ_DISALLOW_COPY(LocalListener);
  kj::ConnectionReceiver& receiver() { return *receiver_; }

 private:
  std::string path_;
  kj::Own<kj::ConnectionReceiver> receiver_;
};

// "uid 1000" for a Unix connection, the address for a network one.
std::string peerName(kj::AsyncIoStream& stream);
// No delay, and keep-alive that notices a dead network peer within a minute.
void tuneNetworkSocket(kj::AsyncIoStream& stream);

}  // namespace gpupool::server
