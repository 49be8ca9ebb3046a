#pragma once
// HTTP/1.1 for the REST interface: kj-http on the manager's event loop, behind limits of its own.
//
// Each connection has a server, so that it can be closed after an answer. What is refused, and the connection
// closed, since kj-http 0.9.2 would guess or answer with a file's name: a Content-Length that is not one
// plain number, any Transfer-Encoding (requests name their length), both together. A peer that sends no
// request, half of one, or does not read answers loses its connection, and costs others nothing meanwhile.

#include <kj/async-io.h>
#include <kj/compat/http.h>
#include <kj/timer.h>

#include <string>

#include "pool-manager/peer_count.h"
#include "pool-manager/rest/exchange.h"
#include "pool-manager/service.h"

namespace gpupool::pool::rest {

inline constexpr uint16_t kDefaultHttpPort = 4781;

struct HttpLimits {
  size_t bodyBytes = 64 << 10;  // of a request
  size_t urlBytes = 4096;
  size_t connections = 256;                 // of one host, or of one user of a Unix socket, at once
  kj::Duration request = 10 * kj::SECONDS;  // it arrives within this
  kj::Duration idle = 60 * kj::SECONDS;     // between two requests of a connection
  kj::Duration write = 30 * kj::SECONDS;    // a peer takes what is written to it within this
};

// What the requests mean (api.h).
class Answerer {
 public:
  virtual ~Answerer() = default;
  // Whether the request is answered whoever asks: nobody needs to prove anything then.
  virtual bool open(const Request& request) = 0;
  // Fails with toException(), or with what the pool failed with.
  virtual kj::Promise<Answer> answer(Request request) = 0;
};

class HttpFront final : private kj::TaskSet::ErrorHandler {
 public:
  // All outlive it. The listeners that it is given are the service's.
  HttpFront(kj::Timer& timer, Service& service, Answerer& answerer, const HttpLimits& limits = {});
  ~HttpFront() noexcept {}

  void serve(kj::Own<kj::ConnectionReceiver> listener, bool local);

 private:
  class Connection;
  void accept(kj::Own<kj::AsyncIoStream> stream, bool trusted, const std::string& peer);
  void taskFailed(kj::Exception&& error) override;

  kj::Timer& timer_;
  Service& service_;
  Answerer& answerer_;
  HttpLimits limits_;
  PeerCount connections_;
  kj::Own<kj::HttpHeaderTable> headers_;
  kj::HttpHeaderId authorization_, key_, known_, lastEvent_, origin_, requestId_;
  kj::TaskSet tasks_;  // last: connections end while all of the above lives
};

}  // namespace gpupool::pool::rest
