#pragma once
// What a connection from the network goes through first, where the manager has a certificate: TLS. One
// thread.

#include <kj/async-io.h>
#include <kj/timer.h>

#include <optional>
#include <string>

#include "base/tls.h"
#include "pool-manager/peer_count.h"

namespace gpupool::pool {

class TlsDoor {
 public:
  // plainFromLoopback: peers of this host may also speak without TLS: nobody is on the way.
  TlsDoor(kj::Timer& timer, tls::Certificate& certificate, kj::Duration limit, bool plainFromLoopback)
      : timer_(timer), certificate_(certificate), limit_(limit), plainFromLoopback_(plainFromLoopback) {}

  struct Entered {
    kj::Own<kj::AsyncIoStream> stream;       // null: it was refused, and told so if it could be
    std::optional<Fingerprint> certificate;  // that was shown; none: it speaks without TLS
  };
  // peer: the host, of which only so many are on their way in at once. Fails if the peer does not finish the
  // handshake in time, or not at all.
  kj::Promise<Entered> enter(kj::Own<kj::AsyncIoStream> stream, const std::string& peer);

 private:
  kj::Promise<Entered> decide(kj::Own<kj::AsyncIoStream> stream, const std::string& peer);

  kj::Timer& timer_;
  tls::Certificate& certificate_;
  kj::Duration limit_;
  bool plainFromLoopback_;
  PeerCount entering_{"connections that have not begun TLS yet", 64};
};

}  // namespace gpupool::pool
