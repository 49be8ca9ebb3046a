#include "base/tls.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "base/log.h"
#include "base/write_all.h"

namespace gpupool::tls {
namespace {

// kj-tls trusts by name and authority only, and keeps its SSL_CTX to itself, which a fingerprint needs. An
// explicit instantiation may name a private member; a kj without it does not compile.
template <auto member>
struct Reveal {
  friend SSL_CTX* contextOf(kj::TlsContext& context) { return static_cast<SSL_CTX*>(context.*member); }
};
SSL_CTX* contextOf(kj::TlsContext& context);
template struct Reveal<&kj::TlsContext::ctx>;

template <class T, void (*release)(T*)>
struct Releaser {
  void operator()(T* object) const { release(object); }
};
template <class T, void (*release)(T*)>
using Handle = std::unique_ptr<T, Releaser<T, release>>;
using CertificateHandle = Handle<X509, X509_free>;
using KeyHandle = Handle<EVP_PKEY, EVP_PKEY_free>;
using BioHandle = Handle<BIO, BIO_free_all>;

std::string opensslError() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "OpenSSL failed" : reason;
}

void demand(bool done, const std::string& what) {
  if (!done) throw std::runtime_error(what + ": " + opensslError());
}

std::string contentOf(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!(text << file.rdbuf())) throw std::runtime_error(path + ": cannot be read");
  return text.str();
}

BioHandle memory(const std::string& text) {
  return BioHandle(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

int noPassphrase(char*, int, int, void*) { return -1; }

CertificateHandle firstCertificate(const std::string& path, const std::string& text) {
  CertificateHandle certificate(PEM_read_bio_X509(memory(text).get(), nullptr, noPassphrase, nullptr));
  demand(certificate != nullptr, path + ": holds no certificate (PEM)");
  return certificate;
}

Fingerprint fingerprintOf(X509* certificate) {
  Fingerprint digest{};
  unsigned size = digest.size();
  if (X509_digest(certificate, EVP_sha256(), reinterpret_cast<unsigned char*>(digest.data()), &size) != 1)
    digest = {};
  return digest;
}

void write(const std::string& path, mode_t mode, const BioHandle& text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (file < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
  char* data = nullptr;
  const long size = BIO_get_mem_data(text.get(), &data);
  const bool done = writeAll(file, {data, static_cast<size_t>(size)}) && ::fsync(file) == 0;
  ::close(file);
  if (!done) throw std::runtime_error(path + ": cannot be written");
}

void addExtension(X509* certificate, int kind, const std::string& value) {
  Handle<X509_EXTENSION, X509_EXTENSION_free> extension(
      X509V3_EXT_conf_nid(nullptr, nullptr, kind, value.c_str()));
  demand(extension != nullptr && X509_add_ext(certificate, extension.get(), -1) == 1, "a certificate");
}

CertificateHandle selfSigned(EVP_PKEY* key) {
  CertificateHandle made(X509_new());
  demand(made != nullptr, "a certificate");
  uint64_t serial = 0;
  randomBytes(std::as_writable_bytes(std::span(&serial, 1)));
  X509_set_version(made.get(), X509_VERSION_3);
  ASN1_INTEGER_set_uint64(X509_get_serialNumber(made.get()), serial >> 1 | 1);
  // RFC 5280: the last is of a certificate that has no end. The clocks of those who connect may be wrong.
  ASN1_TIME_set_string(X509_getm_notBefore(made.get()), "20200101000000Z");
  ASN1_TIME_set_string(X509_getm_notAfter(made.get()), "99991231235959Z");
  X509_NAME* name = X509_get_subject_name(made.get());
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>("gpupool-manager"), -1, -1, 0);
  X509_set_issuer_name(made.get(), name);
  X509_set_pubkey(made.get(), key);
  char host[HOST_NAME_MAX + 1] = "";
  ::gethostname(host, sizeof host - 1);
  const bool named = host[0] != '\0' &&
                     std::strspn(host, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-") ==
                         std::strlen(host);
  addExtension(made.get(), NID_subject_alt_name,
               (named ? "DNS:" + std::string(host) + "," : "") + "DNS:localhost,IP:127.0.0.1,IP:::1");
  addExtension(made.get(), NID_basic_constraints, "critical,CA:FALSE");
  demand(X509_sign(made.get(), key, EVP_sha256()) != 0, "a certificate");
  return made;
}

bool isAddress(const std::string& name) {
  in6_addr address{};
  return ::inet_pton(AF_INET, name.c_str(), &address) == 1 ||
         ::inet_pton(AF_INET6, name.c_str(), &address) == 1;
}

// What a handshake is asked, and finds.
struct Verdict {
  Trust trust;
  std::string name;
  bool shown = false;
  Fingerprint certificate{};
  std::string refused;

  bool judge(X509_STORE_CTX* chain) {
    shown = true;
    certificate = fingerprintOf(X509_STORE_CTX_get0_cert(chain));
    if (std::find(trust.certificates.begin(), trust.certificates.end(), certificate) !=
        trust.certificates.end()) {
      X509_STORE_CTX_set_error(chain, X509_V_OK);
      return true;
    }
    if (!trust.authorities.empty()) {
      X509_VERIFY_PARAM* rules = X509_STORE_CTX_get0_param(chain);
      X509_VERIFY_PARAM_set_flags(rules, X509_V_FLAG_PARTIAL_CHAIN);
      if (isAddress(name)) {  // kj-tls knows names only
        X509_VERIFY_PARAM_set1_host(rules, nullptr, 0);
        X509_VERIFY_PARAM_set1_ip_asc(rules, name.c_str());
      }
      if (X509_verify_cert(chain) == 1) return true;
    } else {
      X509_STORE_CTX_set_error(chain, X509_V_ERR_CERT_UNTRUSTED);
    }
    refused = reason(X509_STORE_CTX_get_error(chain));
    return false;
  }

  std::string reason(int error) const {
    std::string text = "it shows the certificate " + fingerprintText(certificate);
    for (size_t i = 0; i < trust.certificates.size(); ++i)
      text += (i == 0 ? ", and the token file names " : " and ") + fingerprintText(trust.certificates[i]);
    if (!trust.authorities.empty())
      text += ", which is not valid for '" + name + "' by the authorities of " + trust.authorities + " (" +
              X509_verify_cert_error_string(error) + ")";
    return text;
  }
};

int judge(X509_STORE_CTX* chain, void* verdict) {
  return static_cast<Verdict*>(verdict)->judge(chain) ? 1 : 0;
}

std::shared_ptr<kj::TlsContext> clientContext(Verdict& verdict) {
  kj::TlsContext::Options options;
  options.useSystemTrustStore = false;
  auto context = std::make_shared<kj::TlsContext>(options);
  SSL_CTX* raw = contextOf(*context);
  SSL_CTX_set_min_proto_version(raw, TLS1_3_VERSION);
  SSL_CTX_set_verify(raw, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_cert_verify_callback(raw, judge, &verdict);
  if (const std::string& file = verdict.trust.authorities;
      !file.empty() && SSL_CTX_load_verify_file(raw, file.c_str()) != 1)
    verdict.refused = "the authorities of " + file + " cannot be read: " + opensslError();
  return context;
}

}  // namespace

void makeCertificate(const std::string& certificateFile, const std::string& keyFile) {
  for (const std::string& path : {certificateFile, keyFile})
    if (std::filesystem::exists(path)) throw std::runtime_error(path + ": is there already");
  const KeyHandle key(EVP_EC_gen("P-256"));
  demand(key != nullptr, "a key");
  const CertificateHandle certificate = selfSigned(key.get());
  const BioHandle keyText(BIO_new(BIO_s_mem())), text(BIO_new(BIO_s_mem()));
  demand(PEM_write_bio_PrivateKey(keyText.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr) == 1,
         keyFile);
  demand(PEM_write_bio_X509(text.get(), certificate.get()) == 1, certificateFile);
  write(keyFile, 0600, keyText);
  write(certificateFile, 0644, text);
}

Fingerprint fingerprintOf(const std::string& certificateFile) {
  return fingerprintOf(firstCertificate(certificateFile, contentOf(certificateFile)).get());
}

Certificate::Certificate(std::string certificateFile, std::string keyFile)
    : certificateFile_(std::move(certificateFile)), keyFile_(std::move(keyFile)), current_(read()) {}

Certificate::Pair Certificate::read() const {
  struct stat info{};
  if (::stat(keyFile_.c_str(), &info) != 0) throw std::runtime_error(keyFile_ + ": " + std::strerror(errno));
  if ((info.st_mode & 007) != 0)
    throw std::runtime_error(keyFile_ +
                             ": everybody may read the key: chmod 600 it, and change it if somebody did");
  const std::string text = contentOf(certificateFile_), keyText = contentOf(keyFile_);
  const CertificateHandle certificate = firstCertificate(certificateFile_, text);
  const KeyHandle key(PEM_read_bio_PrivateKey(memory(keyText).get(), nullptr, noPassphrase, nullptr));
  demand(key != nullptr, keyFile_ + ": holds no key without a passphrase (PEM)");
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    ERR_clear_error();
    throw std::runtime_error(keyFile_ + ": is not the key of " + certificateFile_);
  }
  const kj::TlsKeypair pair{kj::TlsPrivateKey(kj::StringPtr(keyText.c_str())),
                            kj::TlsCertificate(kj::StringPtr(text.c_str()))};
  kj::TlsContext::Options options;
  options.useSystemTrustStore = false;
  options.minVersion = kj::TlsVersion::TLS_1_2;
  options.defaultKeypair = pair;
  Pair found{std::make_shared<kj::TlsContext>(options), fingerprintOf(certificate.get())};
  SSL_CTX* raw = contextOf(*found.context);
  SSL_CTX_set_num_tickets(raw, 0);  // each login is one of its own connection
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(raw, SSL_OP_NO_RENEGOTIATION);
  return found;
}

void Certificate::reload() {
  try {
    current_ = read();
    GPUPOOL_INFO("the certificate of %s is %s", certificateFile_.c_str(),
                 fingerprintText(fingerprint()).c_str());
  } catch (const std::exception& error) {
    GPUPOOL_ERROR("%s; the certificate that was read before stays", error.what());
  } catch (const kj::Exception& error) {
    GPUPOOL_ERROR("%s: %s; the certificate that was read before stays", certificateFile_.c_str(),
                  error.getDescription().cStr());
  }
}

kj::Promise<kj::Own<kj::AsyncIoStream>> Certificate::accept(kj::Own<kj::AsyncIoStream> stream) {
  auto accepted = current_.context->wrapServer(kj::mv(stream));
  auto context = current_.context;
  return accepted.attach(kj::mv(context));
}

kj::Promise<Connected> connect(kj::Own<kj::AsyncIoStream> stream, Trust trust, const std::string& name) {
  auto verdict = kj::heap<Verdict>(Verdict{std::move(trust), name});
  Verdict& found = *verdict;
  auto context = clientContext(found);
  if (!found.refused.empty()) return Connected{kj::Own<kj::AsyncIoStream>(), {}, found.refused};
  auto shaken = context->wrapClient(kj::mv(stream), name.c_str());
  return shaken
      .then(
          [&found](kj::Own<kj::AsyncIoStream>&& secured) -> kj::Promise<Connected> {
            return Connected{kj::mv(secured), found.certificate, ""};
          },
          [&found](kj::Exception&& error) -> kj::Promise<Connected> {
            if (found.shown && !found.refused.empty())
              return Connected{kj::Own<kj::AsyncIoStream>(), found.certificate, found.refused};
            return kj::mv(error);
          })
      .attach(kj::mv(context), kj::mv(verdict));
}

}  // namespace gpupool::tls
