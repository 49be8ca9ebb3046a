// gpupool claim create, list, renew, release: what a job scheduler does for a job's GPUs.

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "pool-manager/claims.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/lease_wish.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/output.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/table.h"
#include "pool-manager/listing_json.h"
#include "schema/fault.h"

namespace gpupool::cli {
namespace {

constexpr unsigned kCreateMs = 15'000;   // besides --wait: a server takes the claim
constexpr unsigned kReleaseMs = 30'000;  // a server may take this long to end the claim's sessions
constexpr int kWaits = 3, kNever = 4;    // as gpupool explain

const Help kClaimHelp = {
    "gpupool claim create|list|renew|release [options]",
    "Reserves GPUs for a job before its programs start: for job schedulers. The programs use them by "
    "`gpupool run --claim`, or with GPUPOOL_CLAIM in their environment. `gpupool claim create --help` and so "
    "on say more.",
    "", "0: done. 1: it failed. 2: the command line is wrong.",
    "  GPUPOOL_CLAIM=$(gpupool claim create --job alps:4711:0 --gpus 2)\n"
    "  gpupool claim list\n"
    "  gpupool claim release alps:4711:0\n"};

const Help kCreateHelp = {
    "gpupool claim create --job CLUSTER:ID:RESTARTS [options]",
    "Reserves GPUs for a job and prints the claim's id. Programs of the job then use them: with "
    "GPUPOOL_CLAIM "
    "in their environment, set to the id or to the job, or by `gpupool run --claim`. Several may, at once or "
    "one after the other. Asked again for the same job, it gives the same claim, whatever else is asked for; "
    "a "
    "job that is started anew has another restart count, and so another claim. A scheduler that may give a "
    "number again says besides when the job was submitted (CLUSTER:ID:RESTARTS:SUBMITTED, digits): of one "
    "number the latest job's claim ends those of earlier ones. The claim ends by `gpupool "
    "claim release`, when its time limit is over, and when no program has used it for --unused.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: the claim is there. 1: no manager is reachable, or it refuses, for example since the job's claim has "
    "ended. 2: the command line is wrong. 3: not enough GPUs were free within --wait. 4: the pool has no "
    "such "
    "GPUs.",
    "  gpupool claim create --job alps:4711:0 --gpus 2 --gpu h200 --time 2h\n"
    "  gpupool claim create --job alps:4711:0 --memory 20GiB --wait 5m --unused 10m\n"
    "  gpupool claim create --job alps:4711:0 --for alice --token-file /etc/slurm/gpupool.token\n"};

const Help kListHelp = {
    "gpupool claim list [options]",
    "Lists the claims that have GPUs: for which job, how many programs use each, and which GPUs it has.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: listed. 1: no manager is reachable. 2: the command line is wrong.", "  gpupool claim list -o json\n"};

const Help kRenewHelp = {
    "gpupool claim renew [options] CLAIM...",
    "Keeps claims for another --unused of theirs, though no program uses them: for schedulers, as long as "
    "their jobs run. They are named by the first digits of their ids, 4 at least, or by their jobs.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: all are kept. 1: one is not there, or the manager refuses; the others are kept. 2: the command line "
    "is wrong.",
    "  gpupool claim renew 512084cb 90f7aa01\n"};

const Help kReleaseHelp = {
    "gpupool claim release [options] CLAIM",
    "Ends a claim, named by its job or by the first digits of its id, 4 at least, whoever uses it. A job's "
    "claim may be "
    "released again, and before it was made: it is not made any more then.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: the claim is over. 1: there is no such id, or the manager refuses. 2: the command line is wrong.",
    "  gpupool claim release alps:4711:0\n"};

// Those of a lease, but those of its holder.
std::vector<std::string> claimOptionNames() {
  auto names = leaseOptionNames();
  std::erase_if(names, [](const std::string& name) {
    return name == "transport" || name == "network-device" || name == "stall-time" || name == "ttl" ||
           name == "claim";
  });
  return names;
}

void demandNothingElse(const Parsed& parsed) {
  if (!parsed.rest.empty()) throw options::OptionError("'" + parsed.rest[0] + "': no arguments are expected");
}

void demandJob(const std::string& job) {
  try {
    pool::checkJob(job);
  } catch (const std::invalid_argument& error) {
    throw options::OptionError(std::string("--job: ") + error.what());
  }
}

// Waits for nothing, and has no such devices, are answers that a scheduler acts upon.
int statusOf(const kj::Exception& error) {
  if (!schema::faultOf(error).remote) return kExitFailure;
  return error.getType() == kj::Exception::Type::OVERLOADED      ? kWaits
         : error.getType() == kj::Exception::Type::UNIMPLEMENTED ? kNever
                                                                 : kExitFailure;
}

options::Option forTenant(std::string& tenant) {
  return {"for", tenant, "TENANT",
          "With the token of a scheduler or an operator: the tenant whose programs use the claim, and who is "
          "charged for it. Empty: the token's own.",
          true};
}

int create(const Words& words) {
  ClientOptions options;
  std::string job, tenant;
  std::chrono::milliseconds unused{pool::kUnusedMs};
  const Parsed parsed = parseCommand(
      words, kCreateHelp, &options, claimOptionNames(),
      {{"job", job, "CLUSTER:ID:RESTARTS", "The job: its cluster, its id and how often it was started anew.",
        true},
       {"unused", unused, "TIME",
        "The claim ends when no program has used it for so long, after it was made or after the last one has "
        "ended: 1s to 1h.",
        true},
       forTenant(tenant)});
  if (parsed.helped) return 0;
  demandNothingElse(parsed);
  demandJob(job);
  if (unused < std::chrono::seconds(1) || unused > std::chrono::hours(1))
    throw options::OptionError("--unused: 1s to 1h");
  HolderSettings settings = leaseWish(options);
  settings.request.adopts.clear();
  settings.request.job = job;
  settings.request.ttlMs = static_cast<uint32_t>(unused.count());
  settings.request.holder = userAndHost();
  checkTenant("--for", tenant);
  if (!tenant.empty()) settings.request.tenant = tenant;
  ManagerQuery query(settings.addresses, kCreateMs, settings.credentials);
  try {
    const auto told = [](const std::string& what) { std::cerr << "gpupool: " << what << "\n" << std::flush; };
    std::cout << query.claim(settings.request, told).id.text() << "\n";
  } catch (const kj::Exception& error) {
    throw CommandError(statusOf(error), pool::errorText(error));
  }
  return 0;
}

// Those that have GPUs.
std::vector<pool::Lease> claimsOf(ManagerQuery& query) {
  auto claims = query.leases();
  std::erase_if(claims, [](const pool::Lease& lease) { return lease.job.empty(); });
  return claims;
}

int list(const Words& words) {
  ClientOptions client;
  Output output;
  std::vector<options::Option> own;
  output.addTo(own);
  const Parsed parsed = parseCommand(withOutput(words), kListHelp, &client, kAskingOptions, own);
  if (parsed.helped) return 0;
  check(output);
  demandNothingElse(parsed);
  ManagerQuery query(client, 3000);
  const auto claims = claimsOf(query);
  auto entries = nlohmann::json::array();
  std::vector<std::vector<std::string>> rows = {leaseHeading(output.wide())};
  rows[0].back() = "USED BY";
  rows[0].insert(rows[0].begin() + 1, "JOB");
  for (const pool::Lease& claim : claims) {
    entries.push_back(pool::toJson(claim));
    auto row = leaseRow(claim, output.wide());
    const size_t users = claim.adopters.size();
    row.back() = users == 0 ? "-" : users == 1 ? claim.adopters[0] : std::to_string(users) + " programs";
    row.insert(row.begin() + 1, claim.job);
    rows.push_back(std::move(row));
  }
  if (output.json)
    std::cout << pool::dump(entries, 2) << "\n";
  else
    printTable(rows);
  return 0;
}

bool isEnd(pool::AuditEvent event) {
  using pool::AuditEvent;
  return event == AuditEvent::released || event == AuditEvent::expired || event == AuditEvent::revoked ||
         event == AuditEvent::lost;
}

// Of a claim that is not there: whether there was one, by the audit log. Its holder is "claim JOB of WHO".
std::string whyNoClaim(ManagerQuery& query, const std::string& claim) {
  const bool isJob = claim.find(':') != std::string::npos;
  const std::string holder = "claim " + (isJob ? claim : "");
  if (!isJob && claim.find_first_not_of("0123456789abcdef") != std::string::npos)
    return "'" + claim + "' names no claim: name it by its id, how that begins, or its job";
  std::string why = "there is no claim " + claim + ", and `gpupool audit` knows of none that has ended";
  for (const pool::AuditEntry& one : query.audit(isJob ? "" : claim, 0)) {
    const bool same = isJob ? one.holder == holder || one.holder.starts_with(holder + " of ")
                            : one.holder.starts_with(holder);
    if (!same || !isEnd(one.event)) continue;
    why = "claim " + claim + " has ended (" + name(one.event) + " " + timeText(one.timeMs) + ")" +
          (one.reason.empty() ? "" : ": " + one.reason);
  }
  return why;
}

Id claimNamed(ManagerQuery& query, const std::vector<pool::Lease>& claims, const std::string& claim) {
  for (const pool::Lease& one : claims)
    if (one.job == claim) return one.id;
  const bool known = std::any_of(claims.begin(), claims.end(),
                                 [&](const pool::Lease& one) { return one.id.text().starts_with(claim); });
  if (!known && claim.size() >= kLeastDigits) throw CommandError(kExitFailure, whyNoClaim(query, claim));
  return findLease(claims, claim, "claim");
}

int renew(const Words& words) {
  ClientOptions client;
  const Parsed parsed = parseCommand(words, kRenewHelp, &client, kAskingOptions, {});
  if (parsed.helped) return 0;
  if (parsed.rest.empty())
    throw options::OptionError("renew takes one claim or several; `gpupool claim list` lists them");
  ManagerQuery query(client, 3000);
  const auto claims = claimsOf(query);
  std::string failures;
  for (const std::string& claim : parsed.rest) {
    try {
      query.renewClaim(claimNamed(query, claims, claim));
    } catch (const CommandError& error) {
      failures += (failures.empty() ? "" : "; ") + std::string(error.what());
    } catch (const kj::Exception& error) {
      failures += (failures.empty() ? "" : "; ") + claim + ": " + pool::errorText(error);
    }
  }
  if (!failures.empty()) throw CommandError(kExitFailure, failures);
  return 0;
}

int release(const Words& words) {
  ClientOptions client;
  std::string tenant;
  const Parsed parsed = parseCommand(words, kReleaseHelp, &client, kAskingOptions, {forTenant(tenant)});
  if (parsed.helped) return 0;
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("release takes one claim; `gpupool claim list` lists them");
  checkTenant("--for", tenant);
  std::string claim = parsed.rest[0];
  const CredentialSource credentials = credentialsOf(client);
  const bool isJob = claim.find(':') != std::string::npos;
  if (isJob) demandJob(claim);
  ManagerQuery query(managerAddresses(client.manager), kReleaseMs, credentials);
  if (!isJob) claim = claimNamed(query, claimsOf(query), claim).text();
  query.releaseClaim(claim, tenant.empty() ? credentials().tenant : tenant);
  std::cout << "gpupool: claim " << claim << " is over\n";
  return 0;
}

}  // namespace

int runClaim(const Words& words) {
  const Words rest(words.begin() + (words.empty() ? 0 : 1), words.end());
  const std::string what = words.empty() ? "" : words[0];
  if (what == "create") return create(rest);
  if (what == "list") return list(rest);
  if (what == "renew") return renew(rest);
  if (what == "release") return release(rest);
  if (parseCommand(words, kClaimHelp, nullptr, {}, {}).helped) return 0;
  throw options::OptionError("claim: create, list, renew or release? usage: " +
                             std::string(kClaimHelp.usage));
}

}  // namespace gpupool::cli
