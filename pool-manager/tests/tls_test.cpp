// TLS between the manager and those who connect: whom either side trusts, and what it says of the others.
#include "base/tls.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "catch.h"
#include "fake_server.h"
#include "pool-manager/rest/api.h"
#include "pool-manager/rpc.h"
#include "pool-manager/service.h"
#include "schema/manager_login.h"
#include "support.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

const std::string kAlice(32, 'a'), kServers(32, 's');

// Of 2020, for localhost and 127.0.0.1.
const char kExpired[] =
    "-----BEGIN CERTIFICATE-----\n"
    "MIIBRzCB7qADAgECAgEBMAoGCCqGSM49BAMCMA4xDDAKBgNVBAMMA29sZDAeFw0y\n"
    "MDAxMDEwMDAwMDBaFw0yMTAxMDEwMDAwMDBaMA4xDDAKBgNVBAMMA29sZDBZMBMG\n"
    "ByqGSM49AgEGCCqGSM49AwEHA0IABO05Yk2HnVUBNkJY/NxNa/PN6ZsVP87QG3Ar\n"
    "uV0w1WKELzAGe2zmHCM6asXNzn0ENz9ICvq1HWyPDR2sX0IIhNejPTA7MBoGA1Ud\n"
    "EQQTMBGCCWxvY2FsaG9zdIcEfwAAATAdBgNVHQ4EFgQUVcJDZnYpYPdEjcOmW+wt\n"
    "cNIGnDQwCgYIKoZIzj0EAwIDSAAwRQIgHfThhnx5l8sgQh3lx3rmnL+syvpsJZe3\n"
    "Qx+Q9xLDREYCIQCz+zZXJN+uIfkGrl52UI5F9hLppwlI84oeO2gpkr21TQ==\n"
    "-----END CERTIFICATE-----\n";
const char kExpiredKey[] =
    "-----BEGIN EC PRIVATE KEY-----\n"
    "MHcCAQEEIL/6AfNktdwXl8SBGOQeIln9aFXgcr3/VNqF1Pxb9JQUoAoGCCqGSM49\n"
    "AwEHoUQDQgAE7TliTYedVQE2Qlj83E1r883pmxU/ztAbcCu5XTDVYoQvMAZ7bOYc\n"
    "Izpqxc3OfQQ3P0gK+rUdbI8NHaxfQgiE1w==\n"
    "-----END EC PRIVATE KEY-----\n";

void write(const std::string& path, const std::string& text, mode_t mode = 0600) {
  ::unlink(path.c_str());
  std::ofstream(path) << text;
  ::chmod(path.c_str(), mode);
}

std::string refusal(const std::function<void()>& action) {
  KJ_IF_MAYBE (error, kj::runCatchingExceptions([&]() { action(); })) {
    const std::string text = schema::loginRefusal(*error);
    return text.empty() ? errorText(*error) : text;
  }
  return "";
}

// A certificate and its key in a folder of their own.
struct Files {
  explicit Files(bool make = true) {
    if (make) tls::makeCertificate(certificate, key);
  }
  Folder folder;
  std::string certificate = folder.path + "/m.crt", key = folder.path + "/m.key";
};

// Listens, and passes what comes on to somebody else.
class Middle final : private kj::TaskSet::ErrorHandler {
 public:
  // certificate: ends TLS with it; null: leaves it alone. to: speaks TLS with whoever is there, if `secure`.
  Middle(kj::AsyncIoContext& io, tls::Certificate* certificate, std::string to, const tls::Trust& trust)
      : io_(io), certificate_(certificate), to_(std::move(to)), trust_(trust), tasks_(*this) {
    listener_ = io.provider->getNetwork().parseAddress("127.0.0.1:0").wait(io.waitScope)->listen();
    address = "127.0.0.1:" + std::to_string(listener_->getPort());
    tasks_.add(listener_->accept().then(
        [this](kj::Own<kj::AsyncIoStream> stream) { return relay(kj::mv(stream)); }));
  }
  std::string address;

 private:
  kj::Promise<void> relay(kj::Own<kj::AsyncIoStream> from) {
    auto ended = certificate_ == nullptr ? kj::Promise<kj::Own<kj::AsyncIoStream>>(kj::mv(from))
                                         : certificate_->accept(kj::mv(from));
    return ended.then([this](kj::Own<kj::AsyncIoStream> near) {
      return io_.provider->getNetwork()
          .parseAddress(to_.c_str())
          .then([](kj::Own<kj::NetworkAddress> there) {
            auto connected = there->connect();
            return connected.attach(kj::mv(there));
          })
          .then([this](kj::Own<kj::AsyncIoStream> far) {
            return tls::connect(kj::mv(far), trust_, "127.0.0.1");
          })
          .then([near = kj::mv(near)](tls::Connected far) mutable {
            auto both = near->pumpTo(*far.stream)
                            .ignoreResult()
                            .exclusiveJoin(far.stream->pumpTo(*near).ignoreResult());
            return both.attach(kj::mv(near), kj::mv(far.stream));
          });
    });
  }
  void taskFailed(kj::Exception&&) override {}

  kj::AsyncIoContext& io_;
  tls::Certificate* certificate_;
  std::string to_;
  tls::Trust trust_;
  kj::Own<kj::ConnectionReceiver> listener_;
  kj::TaskSet tasks_;
};

struct Fixture {
  // expired: its certificate is.
  explicit Fixture(bool secure = true, kj::Duration login = 60 * kj::SECONDS, bool expired = false)
      : files(!expired),
        certificateFile(files.certificate),
        keyFile(files.key),
        certificate((expired ? write(certificateFile, kExpired), write(keyFile, kExpiredKey) : void(),
                     certificateFile),
                    keyFile),
        io(kj::setupAsyncIo()),
        store(makeMemoryStore()) {
    ServiceLimits limits;
    limits.tick = 10 * kj::MILLISECONDS;
    limits.login = login;
    limits.plainFromLoopback = false;
    service = kj::heap<Service>(io.provider->getTimer(), *store, PoolTimes{}, limits, bootTimeMs);
    service->demandTokens([this]() -> const Tokens& { return tokens; });
    if (secure) service->demandTls(certificate);
    api = kj::heap<rest::Api>(io.provider->getTimer(), *service);
    http = kj::heap<rest::HttpFront>(io.provider->getTimer(), *service, *api);
    auto listener = listen();
    port = listener->getPort();
    address = "127.0.0.1:" + std::to_string(port);
    service->serve(kj::mv(listener), false);
    listener = listen();
    httpAddress = "127.0.0.1:" + std::to_string(listener->getPort());
    http->serve(kj::mv(listener), false);
    housekeeping = service->run();
  }
  kj::Own<kj::ConnectionReceiver> listen() {
    return io.provider->getNetwork().parseAddress("127.0.0.1:0").wait(io.waitScope)->listen();
  }
  Credentials alice(std::vector<Fingerprint> certificates, const std::string& authorities = "") {
    return {"alice", kAlice, std::move(certificates), authorities};
  }
  kj::Own<ManagerConnection> connect(const Credentials& credentials, const std::string& to = "") {
    return connectManager(*io.provider, to.empty() ? address : to, 20 * kj::SECONDS,
                          [&] { return credentials; })
        .wait(io.waitScope);
  }
  std::string told(const Credentials& credentials, const std::string& to = "") {
    return refusal([&] { connect(credentials, to); });
  }
  kj::Own<kj::AsyncIoStream> dial(const std::string& to) {
    return io.provider->getNetwork()
        .parseAddress(to.c_str())
        .wait(io.waitScope)
        ->connect()
        .wait(io.waitScope);
  }
  std::string request(kj::AsyncIoStream& stream) {
    const std::string text = "GET /v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write(text.data(), text.size()).wait(io.waitScope);
    const kj::String all =
        io.provider->getTimer().timeoutAfter(20 * kj::SECONDS, stream.readAllText()).wait(io.waitScope);
    return {all.begin(), all.size()};
  }

  Tokens tokens{{"alice", kAlice}, {kServersTenant, kServers}};
  Folder folder;
  Files files;
  std::string certificateFile, keyFile;
  tls::Certificate certificate;
  kj::AsyncIoContext io;
  std::unique_ptr<Store> store;
  kj::Own<Service> service;
  kj::Own<rest::Api> api;
  kj::Own<rest::HttpFront> http;
  std::string address, httpAddress;
  unsigned port = 0;
  kj::Promise<void> housekeeping = nullptr;
};

// A socket that connects from 127.0.0.2, and says nothing.
int silentPeer(unsigned port) {
  const int peer = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in here{AF_INET, 0, {htonl(0x7f000002)}, {}},
      there{AF_INET, htons(static_cast<uint16_t>(port)), {htonl(0x7f000001)}, {}};
  REQUIRE(::bind(peer, reinterpret_cast<sockaddr*>(&here), sizeof here) == 0);
  REQUIRE(::connect(peer, reinterpret_cast<sockaddr*>(&there), sizeof there) == 0);
  return peer;
}

bool closed(int peer) {
  char byte;
  return ::recv(peer, &byte, 1, MSG_DONTWAIT) == 0;
}

}  // namespace

TEST_CASE("certificates and keys in files") {
  Files files;
  struct stat info{};
  REQUIRE(::stat(files.key.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  const Fingerprint print = tls::fingerprintOf(files.certificate);
  CHECK(tls::Certificate(files.certificate, files.key).fingerprint() == print);
  CHECK(parseFingerprint(fingerprintText(print)) == print);
  CHECK(contains(thrown([&] { tls::makeCertificate(files.certificate, files.key); }), "is there already"));
  const Files other;
  CHECK(tls::fingerprintOf(other.certificate) != print);
  CHECK(contains(thrown([&] { tls::Certificate(files.certificate, other.key); }), "is not the key of"));
  CHECK(contains(thrown([&] { tls::Certificate(files.key, files.key); }), "holds no certificate"));
  CHECK(contains(thrown([&] { tls::Certificate(files.certificate, "/nowhere/key"); }), "No such file"));
  ::chmod(files.key.c_str(), 0644);
  CHECK(contains(thrown([&] { tls::Certificate(files.certificate, files.key); }),
                 "everybody may read the key"));
}

TEST_CASE("fingerprints as text") {
  const std::string digits = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
  const auto print = parseFingerprint("sha256:" + digits);
  REQUIRE(print);
  CHECK(fingerprintText(*print) == "sha256:" + digits);
  CHECK(parseFingerprint(
            "sha256 Fingerprint=00:11:22:33:44:55:66:77:88:99:AA:BB:CC:DD:EE:FF:00:11:22:33:44:55:66:77:"
            "88:99:AA:BB:CC:DD:EE:FF") == print);
  CHECK_FALSE(parseFingerprint(digits));
  CHECK_FALSE(parseFingerprint("sha256:" + digits + "0"));
  CHECK_FALSE(parseFingerprint("sha256:" + digits.substr(1)));
  CHECK_FALSE(parseFingerprint("sha256:g" + digits.substr(1)));
}

TEST_CASE("token files that name certificates") {
  Folder folder;
  const std::string path = folder.path + "/t", line = "certificate sha256:" + std::string(64, 'a');
  write(path, "alice: " + kAlice + "\n" + line + "\n certificate  sha256:" + std::string(64, 'b') + "\n");
  const Credentials both = readCredentials(path, "");
  CHECK(both.tenant == "alice");
  REQUIRE(both.certificates.size() == 2);
  CHECK(certificateLine(both.certificates[0]) == line);
  CHECK(readTokens(path).size() == 1);
  write(path, line + "\n");
  CHECK(readCredentials(path, "").certificates.size() == 1);
  CHECK(readCredentials(path, "").token.empty());
  CHECK(contains(thrown([&] { readTokens(path); }), "holds no token"));
  write(path, "certificate sha256:1234\n");
  CHECK(contains(thrown([&] { readCredentials(path, ""); }), "line 1: a certificate is 'sha256:'"));
}

TEST_CASE("whom a client trusts") {
  Fixture fixture;
  const Fingerprint print = fixture.certificate.fingerprint();
  CHECK(fixture.told(fixture.alice({print})) == "");
  const Fingerprint other{};
  CHECK(fixture.told(fixture.alice({other, print})) == "");
  const std::string wrong = fixture.told(fixture.alice({other}));
  CHECK(contains(wrong, "shows the certificate " + fingerprintText(print)));
  CHECK(contains(wrong, "the token file names " + fingerprintText(other)));
  CHECK(fixture.told(fixture.alice({}, fixture.certificateFile)) == "");
  const std::string named = "localhost:" + std::to_string(fixture.port);
  CHECK(fixture.told(fixture.alice({}, fixture.certificateFile), named) == "");
  const Files stranger;
  CHECK(contains(fixture.told(fixture.alice({}, stranger.certificate)), "is not valid for '127.0.0.1'"));
  CHECK(contains(fixture.told(fixture.alice({}, "/nowhere/ca.pem")), "cannot be read"));
  CHECK(contains(fixture.told({"alice", kServers, {print}}), "refuses the token of tenant 'alice'"));
  // Servers and REST come through the same door.
  FakeServer server(fixture.io, "a", 1, fixture.folder.path + "/server");
  server.credentials = {kServersTenant, kServers, {print}, ""};
  server.join(fixture.address);
  server.joined().wait(fixture.io.waitScope);
  auto stream =
      tls::connect(fixture.dial(fixture.httpAddress), {{print}, ""}, "localhost").wait(fixture.io.waitScope);
  CHECK(contains(fixture.request(*stream.stream), "\"status\":\"ok\""));
}

TEST_CASE("a certificate that has expired is good for who names it, and not by its authority") {
  Fixture fixture(true, 60 * kj::SECONDS, true);
  CHECK(fixture.told(fixture.alice({fixture.certificate.fingerprint()})) == "");
  CHECK(contains(fixture.told(fixture.alice({}, fixture.certificateFile)), "certificate has expired"));
}

TEST_CASE("who speaks without TLS to one that does") {
  Fixture fixture;
  CHECK(
      contains(fixture.told(fixture.alice({})), "the manager speaks TLS: put the line with its certificate"));
  auto stream = fixture.dial(fixture.httpAddress);
  const std::string answer = fixture.request(*stream);
  CHECK(contains(answer, "400 Bad Request"));
  CHECK(contains(answer, "tls_required"));
}

TEST_CASE("who speaks TLS to one that does not") {
  Fixture fixture(false);
  CHECK(contains(fixture.told(fixture.alice({fixture.certificate.fingerprint()})),
                 "no TLS connection to the manager was made"));
  CHECK(fixture.told(fixture.alice({})) == "");
}

TEST_CASE("who stands between the two") {
  Fixture fixture;
  const Fingerprint print = fixture.certificate.fingerprint();
  const Files theirs;
  tls::Certificate forged(theirs.certificate, theirs.key);
  const tls::Trust managers{{print}, ""};
  {
    Middle middle(fixture.io, &forged, fixture.address, managers);
    CHECK(contains(fixture.told(fixture.alice({print}), middle.address), "is not trusted"));
  }
  {  // He has a certificate that the client takes; the manager does not take the proof that he passes on.
    Middle middle(fixture.io, &forged, fixture.address, managers);
    const std::string told = fixture.told(fixture.alice({}, theirs.certificate), middle.address);
    CHECK(contains(told, "refuses the token of tenant 'alice'"));
    CHECK(contains(told, "ends the TLS"));
  }
  {  // The client speaks without TLS.
    Middle middle(fixture.io, nullptr, fixture.address, managers);
    CHECK(contains(fixture.told(fixture.alice({}), middle.address), "refuses the token of tenant 'alice'"));
  }
  CHECK(fixture.told(fixture.alice({print})) == "");
}

TEST_CASE("another certificate while connections are there") {
  Fixture fixture;
  const Fingerprint old = fixture.certificate.fingerprint();
  auto before = fixture.connect(fixture.alice({old}));
  const Files next;
  const Fingerprint fresh = tls::fingerprintOf(next.certificate);
  REQUIRE(::rename(next.certificate.c_str(), fixture.certificateFile.c_str()) == 0);
  fixture.certificate.reload();  // halfway: that is not its key
  CHECK(fixture.certificate.fingerprint() == old);
  CHECK(fixture.told(fixture.alice({old})) == "");
  REQUIRE(::rename(next.key.c_str(), fixture.keyFile.c_str()) == 0);
  fixture.certificate.reload();
  CHECK(fixture.certificate.fingerprint() == fresh);
  CHECK(fixture.told(fixture.alice({old, fresh})) == "");
  CHECK(contains(fixture.told(fixture.alice({old})), "is not trusted"));
  before->manager().devicesRequest().send().wait(fixture.io.waitScope);
}

TEST_CASE("peers that begin no TLS") {
  Fixture fixture(true, 2 * kj::SECONDS);
  std::vector<int> peers(70);
  for (int& peer : peers) peer = silentPeer(fixture.port);
  // Others are served; of this host only so many wait.
  CHECK(fixture.told(fixture.alice({fixture.certificate.fingerprint()})) == "");
  const auto closedOnes = [&] {
    return static_cast<size_t>(std::count_if(peers.begin(), peers.end(), closed));
  };
  const auto eventually = [&](size_t count) {
    for (int i = 0; i < 1200 && closedOnes() < count; ++i)
      fixture.io.provider->getTimer().afterDelay(50 * kj::MILLISECONDS).wait(fixture.io.waitScope);
    return closedOnes();
  };
  CHECK(eventually(6) >= 6);
  CHECK(eventually(peers.size()) == peers.size());  // not for ever
  for (const int peer : peers) ::close(peer);
  CHECK(fixture.told(fixture.alice({fixture.certificate.fingerprint()})) == "");
}
