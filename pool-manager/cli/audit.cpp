// gpupool audit: what has happened to leases and servers.

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/output.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/table.h"
#include "pool-manager/listing_json.h"

namespace gpupool::cli {
namespace {

using nlohmann::json;

const Help kAuditHelp = {
    "gpupool audit [options]",
    "Lists what has happened to leases and servers, the oldest first: when, what, to which lease, where, who "
    "held it, on whose word, and why. Times are of the manager's clock. The manager keeps the latest entries "
    "(its option --audit-entries), also through its restarts. Of other tenants' leases it is not shown whose "
    "they are, nor why something happened.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: success. 1: no manager is reachable. 2: the command line is wrong.",
    "  gpupool audit --since 1h\n  gpupool audit --lease 3f2a91c4 -o json\n"};

std::string orDash(const std::string& text) { return text.empty() ? "-" : text; }

void print(const std::vector<pool::AuditEntry>& entries, bool wide) {
  std::vector<std::vector<std::string>> rows = {
      {"TIME", "EVENT", "LEASE", "WHERE", "TENANT", "HOLDER", "BY", "WHY"}};
  if (wide) rows[0].insert(rows[0].begin(), "NUMBER");
  for (const pool::AuditEntry& one : entries) {
    const std::string lease = one.lease == Id{} ? "-" : wide ? one.lease.text() : shortId(one.lease);
    auto& row = rows.emplace_back(
        std::vector<std::string>{timeText(one.timeMs), name(one.event), lease, orDash(one.server),
                                 orDash(one.tenant), orDash(one.holder), orDash(one.by), orDash(one.reason)});
    if (wide) row.insert(row.begin(), std::to_string(one.number));
  }
  printTable(rows);
}

void printJson(const std::vector<pool::AuditEntry>& entries) {
  json list = json::array();
  for (const pool::AuditEntry& one : entries) list.push_back(toJson(one));
  cli::printJson(list);
}

}  // namespace

int runAudit(const Words& words) {
  ClientOptions client;
  std::string lease;
  std::chrono::milliseconds since{0};
  Output output;
  std::vector<options::Option> own = {
      {"lease", lease, "LEASE", "Only what is about this lease: its id, or how that begins.", true},
      {"since", since, "TIME", "Only what is not older than this. 0: everything.", true}};
  output.addTo(own);
  const Parsed parsed = parseCommand(withOutput(words), kAuditHelp, &client, kAskingOptions, own);
  if (parsed.helped) return 0;
  check(output);
  if (!parsed.rest.empty()) throw options::OptionError("'" + parsed.rest[0] + "': no arguments are expected");
  if (lease.find_first_not_of("0123456789abcdef") != std::string::npos)
    throw options::OptionError("--lease: '" + lease + "' is no lease's id");
  ManagerQuery query(client, 3000);
  const auto entries = query.audit(lease, static_cast<uint64_t>(since.count()));
  output.json ? printJson(entries) : print(entries, output.wide());
  return 0;
}

}  // namespace gpupool::cli
