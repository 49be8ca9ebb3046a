#include "schema/manager_link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <stdexcept>

#include "base/tls.h"
#include "schema/fault.h"

namespace gpupool::schema {
namespace {

[[noreturn]] void distrust(const std::string& text) {
  kj::throwFatalException(faultException(FaultKind::token, text));
}

Credentials shown(const CredentialSource& credentials) {
  try {
    return credentials();
  } catch (const std::runtime_error& error) {
    distrust(error.what());
  }
}

// Of "host", "host:port", "[::1]:port" or "::1".
std::string hostOf(const std::string& address) {
  if (address.starts_with('[')) return address.substr(1, address.find(']') - 1);
  const size_t colon = address.find(':');
  return colon == address.rfind(':') ? address.substr(0, colon) : address;
}

// OpenSSL's own words, of what kj-tls makes of them.
std::string handshakeText(const kj::Exception& error) {
  const std::string text = faultOf(error).text, before = "message = ";
  const size_t at = text.find(before);
  return at == std::string::npos ? text : text.substr(at + before.size());
}

kj::Promise<ManagerLink> secure(kj::Own<kj::AsyncIoStream> stream, const std::string& address,
                                const Credentials& credentials) {
  const tls::Trust trust{credentials.certificates, credentials.authorities};
  if (address.starts_with("unix:") || !trust.any())
    return ManagerLink{kj::mv(stream), address, credentials, std::nullopt};
  return tls::connect(kj::mv(stream), trust, hostOf(address))
      .then(
          [address, credentials](tls::Connected&& connected) {
            if (connected.stream.get() == nullptr)
              distrust("the manager at " + address + " is not trusted: " + connected.refused +
                       "; it is not your pool's, or its certificate was changed: ask an operator");
            return ManagerLink{kj::mv(connected.stream), address, credentials, connected.certificate};
          },
          [](kj::Exception&& error) -> ManagerLink {
            kj::throwFatalException(
                kj::Exception(error.getType(), "", 0,
                              kj::str("no TLS connection to the manager was made: ", handshakeText(error),
                                      "; does it have a certificate (gpupool-manager certificate)?")));
          });
}

}  // namespace

kj::Promise<ManagerLink> reachManager(kj::Network& network, const std::string& address,
                                      const CredentialSource& credentials) {
  return kj::evalNow([&] {
    return network.parseAddress(address.c_str(), kDefaultManagerPort)
        .then([](kj::Own<kj::NetworkAddress> parsed) {
          auto connected = parsed->connect();
          return connected.attach(kj::mv(parsed));
        })
        .then([address, shown = shown(credentials)](kj::Own<kj::AsyncIoStream> stream) {
          endWithHost(*stream);
          return secure(kj::mv(stream), address, shown);
        });
  });
}

void endWithHost(kj::AsyncIoStream& stream) {
  constexpr int kSeconds = 5, kProbes = 3;
  KJ_IF_MAYBE (descriptor, stream.getFd()) {
    const auto set = [&](int level, int name, int value) {
      ::setsockopt(*descriptor, level, name, &value, sizeof value);
    };
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
    set(IPPROTO_TCP, TCP_KEEPIDLE, kSeconds);
    set(IPPROTO_TCP, TCP_KEEPINTVL, kSeconds);
    set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, kSeconds * kProbes * 1000);  // and for what was sent
  }
}

}  // namespace gpupool::schema
