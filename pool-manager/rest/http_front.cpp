#include "pool-manager/rest/http_front.h"

#include <strings.h>

#include <algorithm>
#include <charconv>

#include "base/log.h"
#include "pool-manager/model.h"
#include "pool-manager/rest/bearer.h"
#include "pool-manager/rest/careful_stream.h"
#include "pool-manager/rest/request_line.h"
#include "pool-manager/rpc.h"
#include "schema/id.h"

namespace gpupool::pool::rest {
namespace {

constexpr kj::Duration kLinger = 1 * kj::SECONDS;
constexpr size_t kMostLinger = 256 << 10;
constexpr size_t kMostRequestId = 128;

std::string text(kj::Maybe<kj::StringPtr> header) {
  KJ_IF_MAYBE (value, header) return {value->begin(), value->size()};
  return "";
}

// What the requester calls it, if that can be repeated in a header and a log; else a name of ours.
std::string requestId(const std::string& theirs) {
  const bool usable = !theirs.empty() && theirs.size() <= kMostRequestId &&
                      std::all_of(theirs.begin(), theirs.end(), [](char c) { return c > ' ' && c <= '~'; });
  return usable ? theirs : Id::random().text();
}

kj::StringPtr reason(unsigned status) {
  switch (status) {
    case 200:
      return "OK";
    case 202:
      return "Accepted";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 409:
      return "Conflict";
    case 411:
      return "Length Required";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
    case 415:
      return "Unsupported Media Type";
    case 422:
      return "Unprocessable Content";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    default:
      return "Service Unavailable";
  }
}

bool isDigits(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// Of a request that is too large, or whose end is not known, nothing more is read.
bool leavesRest(const Problem& problem) {
  return problem.status == 408 || problem.status == 411 || problem.status == 413 ||
         problem.code == "bad_framing";
}

}  // namespace

class HttpFront::Connection final : private kj::HttpService,
                                    private kj::HttpServerErrorHandler,
                                    private kj::HttpServerCallbacks {
 public:
  // trusted: its peer is the manager's own user, who may do everything.
  Connection(HttpFront& front, kj::Own<kj::AsyncIoStream> stream, bool trusted, std::string peer)
      : front_(front),
        stream_(carefulStream(kj::mv(stream), front.timer_, front.limits_.write)),
        trusted_(trusted),
        peer_(std::move(peer)),
        server_(front.timer_, *front.headers_, static_cast<kj::HttpService&>(*this), settings()) {}

  kj::Promise<void> run() {
    return server_.listenHttpCleanDrain(*stream_).then([this](bool) {
      stream_->shutdownWrite();
      // The answer may be lost if the connection is closed while more comes.
      return front_.timer_.afterDelay(kLinger).exclusiveJoin(discard(kMostLinger));
    });
  }

 private:
  kj::HttpServerSettings settings() {
    kj::HttpServerSettings settings;
    settings.headerTimeout = front_.limits_.request;
    settings.pipelineTimeout = front_.limits_.idle;
    settings.errorHandler = static_cast<kj::HttpServerErrorHandler&>(*this);
    settings.callbacks = static_cast<kj::HttpServerCallbacks&>(*this);
    return settings;
  }

  kj::Promise<void> discard(size_t most) {
    return stream_->tryRead(discarded_, 1, sizeof discarded_)
        .then([this, most](size_t size) -> kj::Promise<void> {
          if (size == 0 || size > most) return kj::READY_NOW;
          return discard(most - size);
        });
  }

  // --- kj::HttpService
  kj::Promise<void> request(kj::HttpMethod method, kj::StringPtr url, const kj::HttpHeaders& headers,
                            kj::AsyncInputStream& body, Response& response) override {
    const std::string id = requestId(text(headers.get(front_.requestId_)));
    // kj-http 0.9.2 does not ask.
    closing_ = ::strcasecmp(text(headers.get(kj::HttpHeaderId::CONNECTION)).c_str(), "close") == 0;
    return kj::evalNow([&]() { return answer(method, url, headers, body); })
        .catch_([this](kj::Exception&& error) {
          const Problem problem = toProblem(error);
          closing_ = closing_ || leavesRest(problem);
          return toAnswer(problem);
        })
        .then([this, id, method, &response](Answer&& answer) {
          if (method == kj::HttpMethod::HEAD) answer.stream = {};
          return send(kj::mv(answer), id, response);
        })
        .then([this]() {
          // The only way to have kj-http read no more: what has been sent is told apart below.
          if (closing_) kj::throwFatalException(rpcError(kj::Exception::Type::DISCONNECTED, "closed"));
        });
  }

  kj::Promise<Answer> answer(kj::HttpMethod method, kj::StringPtr url, const kj::HttpHeaders& headers,
                             kj::AsyncInputStream& body) {
    const uint64_t length = bodyLength(headers);
    Request request;
    request.method = method == kj::HttpMethod::HEAD ? kj::HttpMethod::GET : method;
    request.peer = peer_;
    request.lastEvent = text(headers.get(front_.lastEvent_));
    request.key = text(headers.get(front_.key_));
    request.known = text(headers.get(front_.known_));
    // The body is read first: where something is wrong with the request, the next one begins behind it.
    const std::string line(url.begin(), url.size());
    const std::string authorization = text(headers.get(front_.authorization_));
    const std::string origin = text(headers.get(front_.origin_)),
                      host = text(headers.get(kj::HttpHeaderId::HOST));
    return read(body, length)
        .then([this, request = kj::mv(request), line, authorization, origin,
               host](kj::String&& text) mutable -> kj::Promise<Answer> {
          if (line.size() > front_.limits_.urlBytes)
            refuse(
                {414, "url_too_long", "the address is too long", "GET /v1/openapi.json lists what there is"});
          parseTarget(line, request);
          TokenBook& tokens = front_.service_.tokens();
          demandSameOrigin(origin, host, tokens.demanded());
          if (trusted_ || !tokens.demanded() || front_.answerer_.open(request))
            request.who = {Principal::Role::admin, "", "", !trusted_};
          else
            request.who = principalOf(authorization, tokens, front_.service_.failures(), peer_);
          request.body = parseBody({text.begin(), text.size()});
          return front_.answerer_.answer(kj::mv(request));
        });
  }

  uint64_t bodyLength(const kj::HttpHeaders& headers) const {
    const std::string length = text(headers.get(kj::HttpHeaderId::CONTENT_LENGTH));
    const bool encoded = headers.get(kj::HttpHeaderId::TRANSFER_ENCODING) != nullptr;
    if (encoded && !length.empty())
      refuse({400, "bad_framing", "the request has both Content-Length and Transfer-Encoding"});
    if (encoded)
      refuse({411, "length_required", "the request is sent in pieces", "send it with its Content-Length"});
    if (headers.get(kj::HttpHeaderId::CONTENT_LENGTH) == nullptr) return 0;
    if (!isDigits(length)) refuse({400, "bad_framing", "the request's Content-Length is not a number"});
    uint64_t bytes = 0;
    const auto parsed = std::from_chars(length.data(), length.data() + length.size(), bytes);
    if (parsed.ec != std::errc() || bytes > front_.limits_.bodyBytes)
      refuse({413, "body_too_large", "the request is too large",
              "send at most " + std::to_string(front_.limits_.bodyBytes) + " bytes"});
    return bytes;
  }

  kj::Promise<kj::String> read(kj::AsyncInputStream& body, uint64_t length) {
    auto late = front_.timer_.afterDelay(front_.limits_.request).then([]() -> kj::Promise<kj::String> {
      return toException({408, "request_timeout", "the request did not arrive in time"});
    });
    return body.readAllText(length + 1)
        .then([](kj::String&& text) -> kj::Promise<kj::String> { return kj::mv(text); },
              [](kj::Exception&&) -> kj::Promise<kj::String> {
                return toException({400, "bad_framing", "the request ended too early"});
              })
        .exclusiveJoin(kj::mv(late));
  }

  kj::Promise<void> send(Answer answer, const std::string& id, Response& response) {
    kj::HttpHeaders headers(*front_.headers_);
    headers.set(kj::HttpHeaderId::CONTENT_TYPE, kj::heapString(answer.contentType.c_str()));
    headers.set(front_.requestId_, kj::heapString(id.c_str()));
    headers.add("Cache-Control", kj::heapString(answer.cacheControl.c_str()));
    headers.add("X-Content-Type-Options", "nosniff");
    for (const auto& [name, value] : answer.headers)
      headers.add(kj::heapString(name.c_str()), kj::heapString(value.c_str()));
    if (answer.stream) {
      closing_ = true;
      auto out = response.send(answer.status, reason(answer.status), headers);
      auto& stream = *out;
      return answer.stream(stream).attach(kj::mv(out), kj::mv(answer.stream));
    }
    if (answer.status == 304) {  // which has no body
      response.send(answer.status, reason(answer.status), headers, uint64_t{0});
      return kj::READY_NOW;
    }
    auto text = kj::heap<std::string>(
        answer.text.empty() ? answer.json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"
                            : answer.text);
    auto out = response.send(answer.status, reason(answer.status), headers, text->size());
    auto written = out->write(text->data(), text->size());
    return written.attach(kj::mv(out), kj::mv(text));
  }

  // --- kj::HttpServerErrorHandler
  kj::Promise<void> handleClientProtocolError(kj::HttpHeaders::ProtocolError error,
                                              Response& response) override {
    closing_ = true;
    Problem problem{400, "bad_request", "the request is not HTTP/1.1 as it should be"};
    if (error.statusCode == 431) problem = {431, "headers_too_large", "the request's headers are too large"};
    if (error.statusCode == 501) problem = {501, "method_unknown", "there is no such method"};
    return send(toAnswer(problem), requestId(""), response);
  }

  // With a response: kj-http itself has failed on the request's framing. Without: the connection is closed.
  kj::Promise<void> handleApplicationError(kj::Exception, kj::Maybe<Response&> response) override {
    closing_ = true;
    KJ_IF_MAYBE (one, response)
      return send(toAnswer({400, "bad_framing", "it is not clear where the request ends"}), requestId(""),
                  *one);
    return kj::READY_NOW;
  }
  kj::Promise<void> handleNoResponse(Response&) override { return kj::READY_NOW; }

  // --- kj::HttpServerCallbacks
  bool shouldClose() override { return closing_; }

  HttpFront& front_;
  kj::Own<kj::AsyncIoStream> stream_;
  const bool trusted_;
  const std::string peer_;
  bool closing_ = false;
  kj::byte discarded_[4096];
  kj::HttpServer server_;  // last: its requests use the rest
};

HttpFront::HttpFront(kj::Timer& timer, Service& service, Answerer& answerer, const HttpLimits& limits)
    : timer_(timer),
      service_(service),
      answerer_(answerer),
      limits_(limits),
      connections_("connections over HTTP", limits.connections),
      tasks_(*this) {
  kj::HttpHeaderTable::Builder builder;
  authorization_ = builder.add("Authorization");
  lastEvent_ = builder.add("Last-Event-ID");
  key_ = builder.add("Idempotency-Key");
  known_ = builder.add("If-None-Match");
  origin_ = builder.add("Origin");
  requestId_ = builder.add("X-Request-Id");
  headers_ = builder.build();
}

void HttpFront::serve(kj::Own<kj::ConnectionReceiver> listener, bool local) {
  service_.serve(kj::mv(listener), local,
                 [this](kj::Own<kj::AsyncIoStream> stream, bool trusted, const std::string& peer) {
                   accept(kj::mv(stream), trusted, peer);
                 });
}

void HttpFront::accept(kj::Own<kj::AsyncIoStream> stream, bool trusted, const std::string& peer) {
  auto place = connections_.take(peer), shared = service_.connections().take(peer);
  if (place == nullptr || shared == nullptr) return;
  auto connection = kj::heap<Connection>(*this, kj::mv(stream), trusted, peer);
  auto done = connection->run();
  tasks_.add(done.attach(kj::mv(connection), kj::mv(place), kj::mv(shared)));
}

void HttpFront::taskFailed(kj::Exception&& error) {
  if (error.getType() != kj::Exception::Type::DISCONNECTED)
    GPUPOOL_DEBUG("a connection over HTTP ended: %s", errorText(error).c_str());
}

}  // namespace gpupool::pool::rest
