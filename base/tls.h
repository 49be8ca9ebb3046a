#pragma once
// TLS between a manager and those who connect to it: kj-tls, by OpenSSL. A manager is known by the
// fingerprint of its certificate, which is what a token file carries, or by an authority that has issued the
// certificate for the manager's name. One thread, on a KJ event loop.

#include <kj/async-io.h>
#include <kj/compat/tls.h>

#include <memory>
#include <string>
#include <vector>

#include "base/fingerprint.h"

namespace gpupool::tls {

// A new key, and a certificate for it that is signed with it: for this host's name and for localhost, without
// an end. Neither file may be there. The key's has mode 0600. Throws std::runtime_error.
void makeCertificate(const std::string& certificateFile, const std::string& keyFile);
// Of the first certificate of a PEM file. Throws std::runtime_error.
Fingerprint fingerprintOf(const std::string& certificateFile);

// The listening side. TLS 1.2 or 1.3.
class Certificate {
 public:
  // PEM: the certificate, and those that lead to its authority after it; its key, which the world must not be
  // able to read. Throws std::runtime_error with one line.
  Certificate(std::string certificateFile, std::string keyFile);
  // Reads the files again, for connections to come. A pair that cannot be used is logged, and changes
  // nothing.
  void reload();
  const Fingerprint& fingerprint() const { return current_.fingerprint; }
  // Does the handshake, however long the peer takes.
  kj::Promise<kj::Own<kj::AsyncIoStream>> accept(kj::Own<kj::AsyncIoStream> stream);

 private:
  struct Pair {
    std::shared_ptr<kj::TlsContext> context;
    Fingerprint fingerprint{};
  };
  Pair read() const;

  std::string certificateFile_, keyFile_;
  Pair current_;
};

// Whom the connecting side takes for its manager: who shows one of the certificates, whatever its dates and
// names; or one that is valid for the manager's name, of an authority of this PEM file.
struct Trust {
  std::vector<Fingerprint> certificates;
  std::string authorities;
  bool any() const { return !certificates.empty() || !authorities.empty(); }
};

struct Connected {
  kj::Own<kj::AsyncIoStream> stream;  // null: the peer is not trusted
  Fingerprint certificate{};          // that it shows
  std::string refused;                // why it is not trusted: one line
};

// The connecting side, TLS 1.3. name: the manager's host, by name or address. Fails if the handshake does.
kj::Promise<Connected> connect(kj::Own<kj::AsyncIoStream> stream, Trust trust, const std::string& name);

}  // namespace gpupool::tls
