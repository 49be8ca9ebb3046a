#include "pool-manager/tokens.h"

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "pool-manager/convert.h"

namespace gpupool::pool {
namespace {

constexpr uint64_t kSaveS = 60;  // when a token was used last is stored so often
constexpr uint64_t kLookS = 1;
constexpr size_t kMostBy = 200;  // bytes of on whose word it was made

Digest digest(capnp::Data::Reader from) {
  Digest to{};
  if (from.size() != to.size()) throw std::runtime_error("store: a token's verifier has not 32 bytes");
  std::memcpy(to.data(), from.begin(), to.size());
  return to;
}

capnp::Data::Reader data(const Digest& from) {
  return {reinterpret_cast<const unsigned char*>(from.data()), from.size()};
}

StoredToken decodeToken(const std::string& bytes) try {
  auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), bytes.data(), words.size() * sizeof(capnp::word));
  capnp::FlatArrayMessageReader message(words);
  const auto from = message.getRoot<schema::StoredToken>();
  StoredToken token = read(from.getInfo());
  token.verifier = {digest(from.getStored()), digest(from.getManager())};
  return token;
} catch (const kj::Exception& error) {
  throw std::runtime_error(std::string("store: a token cannot be read: ") + error.getDescription().cStr());
}

std::string labelOf(const StoredToken& token) { return token.id + " (" + token.name + ")"; }

Principal ofFile(const std::string& tenant) {
  return {tenant == kServersTenant ? Role::server : Role::user, tenant};
}

// Digests of one size are compared.
bool isToken(const std::string& text, const schema::TokenVerifier& verifier) {
  return equalConstantTime(schema::verifierOf(text).stored, verifier.stored);
}

}  // namespace

MadeToken makeToken(const TokenWish& wish, uint64_t nowS) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  if (!isTenantName(wish.tenant) || wish.tenant == "*" || wish.tenant.find(':') != std::string::npos)
    refuse("a tenant's name has 1 to 64 ASCII characters, without spaces and ':', and is not '*'");
  if ((wish.tenant == kServersTenant) != (wish.role == Role::server))
    refuse(std::string("servers, and only they, have tokens of the tenant '") + kServersTenant +
           "' and the role 'server'");
  if (wish.name.size() > kMostTokenName || printable(wish.name, kMostTokenName) != wish.name)
    refuse("a token's name has at most 64 printable bytes");
  if (wish.expiresInS > kMostExpiryS) refuse("a token expires within ten years, or never");
  const NewToken made = gpupool::makeToken();
  MadeToken token;
  token.text = made.text;
  token.token.id = made.id;
  token.token.tenant = wish.tenant;
  token.token.name = wish.name.empty() ? made.id : wish.name;
  token.token.role = wish.role;
  token.token.createdS = nowS;
  token.token.expiresS = wish.expiresInS == 0 ? 0 : nowS + wish.expiresInS;
  token.token.createdBy = printable(wish.by, kMostBy);
  token.token.verifier = schema::verifierOf(made.text);
  return token;
}

Write writeOf(const StoredToken& token) {
  capnp::MallocMessageBuilder message;
  auto to = message.initRoot<schema::StoredToken>();
  pool::write(token, to.initInfo());
  to.setStored(data(token.verifier.stored));
  to.setManager(data(token.verifier.manager));
  const auto words = capnp::messageToFlatArray(message);
  return {kTokenPrefix + token.id, std::string(words.asChars().begin(), words.asChars().size())};
}

void TokenBook::load(const std::vector<Entry>& stored) {
  for (const Entry& entry : stored) {
    StoredToken token = decodeToken(entry.value);
    tokens_[token.id] = std::move(token);
  }
}

const StoredToken* TokenBook::find(const std::string& id) const {
  const auto at = tokens_.find(id);
  return at == tokens_.end() ? nullptr : &at->second;
}

std::optional<TokenBook::Candidate> TokenBook::find(const std::string& token,
                                                    const std::string& tenant) const {
  if (const StoredToken* known = token.empty() ? nullptr : find(token))
    return Candidate{known->verifier, known->principal()};
  if (!file_) return std::nullopt;
  const Tokens& tokens = file_();
  const auto at = tokens.find(tenant);
  if (at == tokens.end()) return std::nullopt;
  return Candidate{schema::verifierOf(at->second), ofFile(tenant)};
}

std::vector<Principal> TokenBook::bearersOf(const std::string& text) const {
  std::vector<Principal> bearers;
  if (const StoredToken* known = find(tokenId(text)); known != nullptr && isToken(text, known->verifier))
    return {known->principal()};
  if (!file_) return bearers;
  for (const auto& [tenant, token] : file_())
    if (isToken(text, schema::verifierOf(token))) bearers.push_back(ofFile(tenant));
  return bearers;
}

std::string TokenBook::endOf(const Principal& who) const {
  if (who.token.empty()) return "";
  const StoredToken* token = find(who.token);
  if (token == nullptr) return "the token " + who.token + " has ended";
  if (token->revokedS != 0)
    return "the token " + labelOf(*token) + " was revoked on " + utcText(token->revokedS);
  if (token->expired(now()))
    return "the token " + labelOf(*token) + " expired on " + utcText(token->expiresS);
  return "";
}

void TokenBook::used(const Principal& who) {
  const auto at = tokens_.find(who.token);
  if (at == tokens_.end() || at->second.usedS == now()) return;
  at->second.usedS = now();
  unsaved_.insert(who.token);
}

AuditEntry TokenBook::entryOf(AuditEvent event, const StoredToken& token, const std::string& by) const {
  AuditEntry entry;
  entry.event = event;
  entry.tenant = token.tenant;
  entry.holder = "token " + labelOf(token) + ", " + pool::name(token.role);
  entry.by = by;
  return entry;
}

void TokenBook::create(const TokenWish& wish, const std::string& by, Created done) {
  MadeToken made = makeToken(wish, now());
  const std::string called = wish.tenant + "/" + made.token.name;
  const bool taken = std::any_of(tokens_.begin(), tokens_.end(), [&](const auto& one) {
    const StoredToken& token = one.second;
    return token.tenant == wish.tenant && token.name == made.token.name && token.valid(now());
  });
  if (taken || making_.contains(called))
    throw std::invalid_argument("tenant '" + wish.tenant + "' has a token named '" + wish.name +
                                "' already: revoke that one, or give this one another name");
  if (tokens_.size() + making_.size() >= kMostTokens)
    throw std::invalid_argument("there are too many tokens: revoke some");
  making_.insert(called);
  writer_({writeOf(made.token)}, {entryOf(AuditEvent::tokenCreated, made.token, by)},
          [this, made, called, done = std::move(done)](const std::string& why) {
            making_.erase(called);
            if (why.empty()) tokens_[made.token.id] = made.token;
            done(made, why);
          });
}

void TokenBook::revoke(const std::string& id, const std::string& by, Journal::Done done) {
  const auto at = tokens_.find(id);
  if (at == tokens_.end()) throw std::invalid_argument("there is no token " + printable(id, 32));
  StoredToken& token = at->second;
  if (token.revokedS != 0 && !unsaved_.contains(id)) return writer_({}, {}, std::move(done));
  std::vector<AuditEntry> entries;
  if (token.revokedS == 0) entries = {entryOf(AuditEvent::tokenRevoked, token, by)};
  if (token.revokedS == 0) token.revokedS = now();
  unsaved_.insert(id);
  writer_({writeOf(token)}, std::move(entries), [this, id, done = std::move(done)](const std::string& why) {
    if (why.empty()) unsaved_.erase(id);
    done(why);
  });
}

std::map<std::string, uint32_t> TokenBook::validByTenant() const {
  std::map<std::string, uint32_t> counts;
  for (const auto& [id, token] : tokens_)
    if (token.valid(now())) ++counts[token.tenant];
  if (file_)
    for (const auto& [tenant, token] : file_()) ++counts[tenant];
  return counts;
}

std::vector<StoredToken> TokenBook::list() const {
  std::vector<StoredToken> list;
  list.reserve(tokens_.size());
  for (const auto& [id, token] : tokens_) list.push_back(token);
  std::stable_sort(list.begin(), list.end(), [](const StoredToken& a, const StoredToken& b) {
    return a.tenant != b.tenant ? a.tenant < b.tenant : a.createdS < b.createdS;
  });
  return list;
}

std::vector<std::string> TokenBook::tick() {
  std::vector<std::string> ended;
  const uint64_t nowS = now();
  if (nowS < lookedS_ + kLookS && nowS >= lookedS_) return ended;
  lookedS_ = nowS;
  const bool save = nowS >= savedS_ + kSaveS || nowS < savedS_;
  if (save) savedS_ = nowS;
  std::vector<Write> writes;
  for (auto at = tokens_.begin(); at != tokens_.end();) {
    const StoredToken& token = at->second;
    if (token.expired(nowS) && ended_.insert(token.id).second) ended.push_back(token.id);
    const uint64_t endS = token.revokedS != 0 ? token.revokedS : token.expiresS;
    // The last one stays: a manager that has had tokens does not let everybody in.
    const bool forget = endS != 0 && nowS >= endS + kForgetTokenS && tokens_.size() > 1;
    if (forget) writes.push_back({kTokenPrefix + token.id, std::nullopt});
    if (!forget && save && unsaved_.contains(token.id)) writes.push_back(writeOf(token));
    at = forget ? tokens_.erase(at) : std::next(at);
  }
  if (save && !writes.empty()) {
    const std::set<std::string> saving = std::exchange(unsaved_, {});
    writer_(std::move(writes), {}, [this, saving](const std::string& why) {
      if (!why.empty()) unsaved_.insert(saving.begin(), saving.end());
    });
  } else if (!writes.empty()) {
    writer_(std::move(writes), {}, [](const std::string&) {});
  }
  return ended;
}

}  // namespace gpupool::pool
