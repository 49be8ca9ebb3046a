#include "base/tokens.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "base/hmac.h"
#include "base/log.h"

namespace gpupool {
namespace {

constexpr size_t kMostBytes = size_t{1} << 20;

std::string readPrivate(const std::string& path) {
  const auto fail = [&](const std::string& why) {
    throw std::runtime_error("token file " + path + ": " + why);
  };
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail(std::strerror(errno));
  struct stat info{};
  std::string text(kMostBytes + 1, '\0');
  const bool known = ::fstat(file, &info) == 0;
  const ssize_t size = known && S_ISREG(info.st_mode) ? ::read(file, text.data(), text.size()) : -1;
  ::close(file);
  if (!known || !S_ISREG(info.st_mode)) fail("is not a file");
  if ((info.st_mode & 077) != 0) fail("others may read it: chmod 600 it, and change the tokens if they did");
  if (info.st_uid != ::geteuid() && info.st_uid != 0) fail("belongs to another user");
  if (size < 0) fail("cannot be read");
  if (static_cast<size_t>(size) > kMostBytes) fail("is larger than 1 MiB");
  text.resize(static_cast<size_t>(size));
  return text;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

bool isWord(const std::string& text) {
  for (const unsigned char c : text)
    if (c <= 0x20 || c >= 0x7f) return false;
  return !text.empty();
}

constexpr std::string_view kMadeToken = "gpt_";
constexpr std::string_view kCertificate = "certificate ";  // no tenant: those are words
constexpr size_t kIdDigits = 16, kSecretDigits = 64;

std::string randomDigits(size_t digits) {
  std::vector<std::byte> bytes(digits / 2);
  randomBytes(bytes);
  std::string text;
  for (const std::byte one : bytes)
    for (const unsigned shift : {4U, 0U})
      text += "0123456789abcdef"[std::to_integer<unsigned>(one >> shift) & 15U];
  return text;
}

}  // namespace

bool isTenantName(const std::string& text) { return isWord(text) && text.size() <= kMostTenantBytes; }

NewToken makeToken() {
  const std::string id = randomDigits(kIdDigits);
  return {id, std::string(kMadeToken) + id + "_" + randomDigits(kSecretDigits)};
}

std::string tokenId(const std::string& token) {
  constexpr size_t kBytes = kMadeToken.size() + kIdDigits + 1 + kSecretDigits;
  if (token.size() != kBytes || !token.starts_with(kMadeToken)) return "";
  const std::string id = token.substr(kMadeToken.size(), kIdDigits);
  return id.find_first_not_of("0123456789abcdef") == std::string::npos ? id : "";
}

namespace {

struct Content {
  Tokens tokens;
  std::vector<Fingerprint> certificates;
};

Content readContent(const std::string& path) {
  Content content;
  Tokens& tokens = content.tokens;
  std::istringstream lines(readPrivate(path));
  int number = 0;
  for (std::string raw; std::getline(lines, raw);) {
    const std::string line = trimmed(raw);
    ++number;
    if (line.empty() || line[0] == '#') continue;
    const auto fail = [&](const std::string& why) {
      throw std::runtime_error("token file " + path + ", line " + std::to_string(number) + ": " + why);
    };
    if (line.starts_with(kCertificate)) {
      const auto certificate = parseFingerprint(trimmed(line.substr(kCertificate.size())));
      if (!certificate) fail("a certificate is 'sha256:' and 64 hexadecimal digits");
      content.certificates.push_back(*certificate);
      continue;
    }
    const size_t colon = line.find(':');
    if (colon == std::string::npos) fail("is not of the form 'tenant: token'");
    const std::string tenant = trimmed(line.substr(0, colon)), token = trimmed(line.substr(colon + 1));
    if (!isTenantName(tenant)) fail("a tenant's name is a word of at most 64 bytes");
    if (!isWord(token) || token.size() < kShortestToken)
      fail("a token is a word of at least 16 characters (openssl rand -hex 32 makes one)");
    if (!tokens.emplace(tenant, token).second) fail("tenant '" + tenant + "' has a token already");
  }
  return content;
}

}  // namespace

Tokens readTokens(const std::string& path) {
  Tokens tokens = readContent(path).tokens;
  if (tokens.empty()) throw std::runtime_error("token file " + path + ": holds no token");
  return tokens;
}

std::string certificateLine(const Fingerprint& certificate) {
  return std::string(kCertificate) + fingerprintText(certificate);
}

Credentials readCredentials(const std::string& path, const std::string& tenant,
                            const std::string& authorities) {
  if (path.empty()) return {tenant, "", {}, authorities};
  const auto [tokens, certificates] = readContent(path);
  if (tokens.empty() && !certificates.empty()) return {tenant, "", certificates, authorities};
  if (tokens.empty()) throw std::runtime_error("token file " + path + ": holds no token");
  const auto found = tenant.empty() && tokens.size() == 1 ? tokens.begin() : tokens.find(tenant);
  if (found != tokens.end()) return {found->first, found->second, certificates, authorities};
  if (tenant.empty())
    throw std::runtime_error("token file " + path + ": holds several tokens: choose a tenant");
  throw std::runtime_error("token file " + path + ": holds no token of tenant '" + tenant + "'");
}

CredentialSource credentialsOf(const std::string& path, const std::string& tenant,
                               const std::string& authorities) {
  // The process may change its directory.
  const std::string issuers = authorities.empty() ? "" : std::filesystem::absolute(authorities).string();
  Credentials first = readCredentials(path, tenant, issuers);
  if (path.empty()) return [first] { return first; };
  return [path = std::filesystem::absolute(path).string(), tenant = first.tenant, issuers] {
    return readCredentials(path, tenant, issuers);
  };
}

TokenFile::TokenFile(std::string path)
    : path_(std::move(path)), stamp_(stamp()), tokens_(readTokens(path_)) {}

const Tokens& TokenFile::current() {
  const Stamp now = stamp();
  if (now == stamp_) return tokens_;
  stamp_ = now;  // a file that is wrong is told of once
  try {
    tokens_ = readTokens(path_);
    GPUPOOL_INFO("token file %s has changed: %zu tenants", path_.c_str(), tokens_.size());
  } catch (const std::exception& error) {
    GPUPOOL_ERROR("%s; the tokens that were read before stay valid", error.what());
  }
  return tokens_;
}

TokenFile::Stamp TokenFile::stamp() const {
  struct stat info{};
  if (::stat(path_.c_str(), &info) != 0) return {};
  const auto ns = [](const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; };
  return {static_cast<int64_t>(info.st_dev), static_cast<int64_t>(info.st_ino), info.st_size,
          ns(info.st_mtim), ns(info.st_ctim)};
}

}  // namespace gpupool
