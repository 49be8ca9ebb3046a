// gpupool tokens: makes, lists and revokes what users and servers prove who they are with.

#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>

#include "pool-manager/cli/holder.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/output.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/table.h"

namespace gpupool::cli {
namespace {

using nlohmann::json;
using pool::StoredToken;

constexpr unsigned kStorePatienceMs = 10'000;
const char* const kEnvironment = "GPUPOOL_STATE: the folder of this machine's pool.";
const char* const kStatus =
    "0: done. 1: the manager refuses, or none is reachable. 2: the command line is wrong.";

const Help kCreateHelp = {
    "gpupool tokens create [options] TENANT",
    "Makes a token for a tenant, and prints its token file: the line 'tenant: token' and, where the manager "
    "has "
    "TLS, one with its certificate. It is not shown again: the manager keeps nothing that anybody could log "
    "in with. From the first token on, whoever "
    "connects from the network has to show one; connections that have shown none are ended. Only the pool's "
    "operator can. Servers' tokens are of the tenant 'servers'.",
    kEnvironment, kStatus,
    "  umask 077; gpupool tokens create --name laptop --expires 720h alice > alice.token\n"
    "  gpupool tokens create --name node7 servers\n"};
const Help kListHelp = {
    "gpupool tokens list [options]",
    "Lists the tokens that were made by `gpupool tokens create`, but not what they are; for 30 days also "
    "those "
    "that have ended. Tokens of the manager's token file are not among them. Only the pool's operator can.",
    kEnvironment, kStatus, "  gpupool tokens list -o wide\n"};
const Help kRevokeHelp = {
    "gpupool tokens revoke [options] TOKEN",
    "Ends a token, named by its id or the first digits of that, 4 at least: it is good for nothing any more, "
    "and "
    "connections that have shown it are ended. Leases are the tenant's: one whose holder does not come back "
    "with another token of the tenant ends when it is not renewed (--ttl, usually 15 s). `gpupool release` "
    "ends one at once. Only the pool's operator can.",
    kEnvironment, kStatus, "  gpupool tokens revoke 3f2a91c4\n"};
const Help kTokensHelp = {
    "gpupool tokens create|list|revoke [options] ...",
    "Tokens: what users and servers prove who they are with. Each of the three has --help.", kEnvironment,
    kStatus, "  gpupool tokens create alice\n  gpupool tokens list\n"};

std::string timeText(uint64_t seconds) {
  if (seconds == 0) return "-";
  const auto time = static_cast<std::time_t>(seconds);
  std::tm local{};
  localtime_r(&time, &local);
  char text[32];
  std::strftime(text, sizeof text, "%F %H:%M", &local);
  return text;
}

const char* stateOf(const StoredToken& token) {
  const auto nowS = static_cast<uint64_t>(std::time(nullptr));
  return token.revokedS != 0 ? "revoked" : token.expired(nowS) ? "expired" : "valid";
}

json toJson(const StoredToken& token) {
  return {{"id", token.id},
          {"tenant", token.tenant},
          {"name", token.name},
          {"role", name(token.role)},
          {"state", stateOf(token)},
          {"createdS", token.createdS},
          {"expiresS", token.expiresS},
          {"lastUsedS", token.usedS},
          {"revokedS", token.revokedS},
          {"createdBy", token.createdBy}};
}

void printTokens(const std::vector<StoredToken>& tokens, bool wide) {
  std::vector<std::vector<std::string>> rows = {
      {"TOKEN", "TENANT", "ROLE", "NAME", "STATE", "EXPIRES", "LAST USED"}};
  if (wide) rows[0].insert(rows[0].end(), {"CREATED", "CREATED BY", "REVOKED"});
  for (const StoredToken& token : tokens) {
    auto& row = rows.emplace_back(std::vector<std::string>{
        token.id, token.tenant, name(token.role), token.name == token.id ? "-" : token.name, stateOf(token),
        timeText(token.expiresS), timeText(token.usedS)});
    if (wide) row.insert(row.end(), {timeText(token.createdS), token.createdBy, timeText(token.revokedS)});
  }
  printTable(rows);
}

int create(const Words& words) {
  ClientOptions client;
  Output output;
  pool::TokenWish wish;
  std::string role;
  std::chrono::milliseconds expires{0};
  std::vector<options::Option> own = {
      {"name", wish.name, "TEXT",
       "What it is for, for people: 'laptop'. A tenant's valid tokens have different names. Empty: its id.",
       true},
      {"role", role, "viewer|user|scheduler|server|operator",
       "What its bearer may do (docs/tenants.md). Empty: server for the tenant 'servers', else user.", true},
      {"expires", expires, "TIME", "It ends after this time: 720h. 0: never.", true}};
  output.addTo(own);
  const Parsed parsed = parseCommand(withOutput(words), kCreateHelp, &client, kAskingOptions, own);
  if (parsed.helped) return 0;
  check(output);
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("tokens create takes one tenant, behind the options");
  wish.tenant = parsed.rest[0];
  if (role.empty()) role = wish.tenant == kServersTenant ? "server" : "user";
  const auto known = pool::roleOf(role);
  if (!known)
    throw options::OptionError("--role: '" + role + "' is not viewer, user, scheduler, server or operator");
  if (expires.count() != 0 && expires < std::chrono::seconds(1))
    throw options::OptionError("--expires: at least 1s, or 0 for never");
  wish.role = *known;
  wish.expiresInS = static_cast<uint64_t>(expires.count() / 1000);
  wish.by = userAndHost();
  const CreatedToken made = ManagerQuery(client, kStorePatienceMs).createToken(wish);
  if (output.json) {
    json value = toJson(made.token);
    value["token"] = made.text;
    value["certificates"] = made.certificates;
    printJson(value);
    return 0;
  }
  std::cout << made.token.tenant << ": " << made.text << '\n';
  for (const std::string& one : made.certificates) std::cout << "certificate " << one << '\n';
  std::cout << std::flush;
  std::cerr << "gpupool: token " << made.token.id << " of tenant " << made.token.tenant << ", " << role
            << (made.token.expiresS == 0 ? ", never expires" : ", expires " + timeText(made.token.expiresS))
            << "; what is on stdout is its file (mode 0600), and is not shown again\n";
  return 0;
}

int list(const Words& words) {
  return listAs(
      words, kListHelp, kAskingOptions,
      [](const ClientOptions& client) { return ManagerQuery(client, kStorePatienceMs).tokens(); },
      printTokens, toJson);
}

int revoke(const Words& words) {
  ClientOptions client;
  const Parsed parsed = parseCommand(words, kRevokeHelp, &client, kAskingOptions, {});
  if (parsed.helped) return 0;
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("tokens revoke takes one token's id; `gpupool tokens list` lists them");
  demandDigits(parsed.rest[0], "token");
  ManagerQuery query(client, kStorePatienceMs);
  std::vector<std::string> found;
  for (const StoredToken& token : query.tokens())
    if (token.id.starts_with(parsed.rest[0])) found.push_back(token.id);
  if (found.size() != 1)
    throw CommandError(kExitFailure, (found.empty() ? "there is no token " : "several tokens begin with ") +
                                         parsed.rest[0] + "; `gpupool tokens list` lists them");
  query.revokeToken(found[0], userAndHost());
  std::cout << "gpupool: token " << found[0] << " is revoked\n";
  return 0;
}

}  // namespace

int runTokens(const Words& words) {
  const std::string verb = words.empty() ? "" : words[0];
  const Words rest(words.begin() + (words.empty() ? 0 : 1), words.end());
  if (verb == "create") return create(rest);
  if (verb == "list") return list(rest);
  if (verb == "revoke") return revoke(rest);
  if (parseCommand(words, kTokensHelp, nullptr, {}, {}).helped) return 0;
  throw options::OptionError("tokens takes create, list or revoke; --help describes them");
}

}  // namespace gpupool::cli
