#include "server/front/departure.h"

#include <fcntl.h>
#include <kj/debug.h>

#include <cerrno>

#include "server/front/listeners.h"

namespace gpupool::server {
namespace {

kj::Exception departureFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
}

kj::AutoCloseFd copyOf(kj::AsyncIoStream& stream) {
  KJ_IF_MAYBE (descriptor, stream.getFd()) {
    const int copy = fcntl(*descriptor, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
      KJ_FAIL_SYSCALL("a connection cannot be given to a worker", errno);
    }
    return kj::AutoCloseFd(copy);
  }
  KJ_FAIL_REQUIRE("the stream has no descriptor");
}

struct Announcement {
  schema::SessionOpening opening;
  kj::Own<kj::AsyncIoStream> stream;
};

kj::Promise<kj::AutoCloseFd> announceOver(kj::Own<kj::AsyncIoStream> stream, schema::SessionOpening opening) {
  tuneNetworkSocket(*stream);
  auto announcement = kj::heap<Announcement>();
  announcement->opening = std::move(opening);
  announcement->stream = kj::mv(stream);
  auto answered = schema::openSession(*announcement->stream, announcement->opening);
  return answered.then([announcement = kj::mv(announcement)](const schema::OpeningAnswer& answer) mutable {
    if (answer.verdict != schema::OpeningVerdict::open)
      kj::throwFatalException(departureFailure(answer.text));
    return copyOf(*announcement->stream);
  });
}

}  // namespace

kj::Promise<kj::AutoCloseFd> announceSession(kj::Network& network, kj::Timer& timer, const Destination& where,
                                             schema::SessionOpening opening, kj::Duration bound) {
  const bool v6 = where.host.find(':') != std::string::npos;
  const std::string address = (v6 ? "[" + where.host + "]" : where.host) + ":" + std::to_string(where.port);
  auto announced = kj::evalNow([&] { return network.parseAddress(address.c_str()); })
                       .then([](kj::Own<kj::NetworkAddress> parsed) {
                         auto connected = parsed->connect();
                         return connected.attach(kj::mv(parsed));
                       })
                       .then([opening = std::move(opening)](kj::Own<kj::AsyncIoStream> stream) mutable {
                         return announceOver(kj::mv(stream), std::move(opening));
                       });
  const std::string server = "server " + where.name + " at " + address;
  return timer.timeoutAfter(bound, kj::mv(announced))
      .catch_([server](kj::Exception&& exception) -> kj::Promise<kj::AutoCloseFd> {
        if (exception.getType() == kj::Exception::Type::FAILED) return kj::mv(exception);
        const bool late = exception.getType() == kj::Exception::Type::OVERLOADED;
        return departureFailure(
            server + (late ? " does not answer" : ": " + std::string(exception.getDescription().cStr())));
      });
}

}  // namespace gpupool::server
