// gpupool explain: what would become of a request, and why.

#include <iostream>
#include <nlohmann/json.hpp>

#include "pool-manager/cli/client_beside.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/lease_wish.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/output.h"
#include "pool-manager/cli/table.h"
#include "pool-manager/listing_json.h"

namespace gpupool::cli {
namespace {

using pool::Explanation;
using pool::Outlook;

constexpr int kWaits = 3, kNever = 4;

const Help kExplainHelp = {
    "gpupool explain [options]",
    "Says whether `gpupool run` with the same options would get its GPUs now, which they would be, and else "
    "what it would wait for, and for each GPU of the pool why it would not be leased. Nothing is leased, and "
    "nobody waits. Of other tenants' leases it says that they are in use, not by whom.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: it would be served now. 1: no manager is reachable, or it refuses the request. 2: the command line "
    "is "
    "wrong. 3: it would have to wait. 4: it can never be served.",
    "  gpupool explain --gpus 2 --gpu h200\n"
    "  gpupool explain --gpu 'memory>=80GiB' --time 1h -o json\n"};

std::string inWords(const Explanation& answer) {
  switch (answer.outlook) {
    case Outlook::now:
      return "it would be leased now: " + answer.text;
    case Outlook::devices:
      return "it would wait until GPUs are free: " + answer.text;
    case Outlook::queue:
      return "it would wait for its turn: " + answer.text;
    case Outlook::server:
      return "it would wait until a server is back, or a GPU works again: " + answer.text;
    case Outlook::anOperator:
      return "it would wait until an operator puts a server back into service: " + answer.text;
    case Outlook::never:
      return "it can never be served: " + answer.text;
    case Outlook::quota:
      return "it would wait for the tenant's quota: " + answer.text;
  }
  return answer.text;
}

void printPlaces(const Explanation& answer) {
  std::cout << "gpupool: " << inWords(answer) << "\n";
  if (answer.ahead != 0)
    std::cout << "gpupool: " << answer.ahead
              << (answer.ahead == 1 ? " request that waits is" : " requests that wait are")
              << " before it in the queue\n";
  std::vector<std::vector<std::string>> rows = {{"SERVER", "GPU", "NAME", "FOR THIS REQUEST"}};
  for (const pool::ServerVerdict& server : answer.servers) {
    if (!server.reason.empty()) rows.push_back({server.name, "-", "-", server.reason});
    for (const pool::DeviceVerdict& device : server.devices)
      rows.push_back({server.name, std::to_string(device.ordinal), device.name,
                      device.reason.empty() ? "could be leased" : device.reason});
  }
  if (rows.size() > 1) printTable(rows);
}

}  // namespace

int runExplain(const Words& words) {
  ClientOptions options;
  Output output;  // there is no wider table
  const std::vector<options::Option> own = {{"output", output.form, "table|json", "Also -o.", true},
                                            {"json", output.json, "", "--output json.", true}};
  const Parsed parsed = parseCommand(withOutput(words), kExplainHelp, &options, leaseOptionNames(), own);
  if (parsed.helped) return 0;
  if (output.wide()) throw options::OptionError("--output: 'wide' is not table or json");
  check(output);
  if (!parsed.rest.empty())
    throw options::OptionError("'" + parsed.rest[0] + "': no arguments are expected, and no program is run");
  HolderSettings settings = leaseWish(options);
  settings.request.client = clientBeside();
  ManagerQuery query(settings.addresses, 3000, settings.credentials);
  const Explanation answer = query.explain(settings.request);
  output.json ? printJson(toJson(answer)) : printPlaces(answer);
  return answer.outlook == Outlook::now ? 0 : answer.outlook == Outlook::never ? kNever : kWaits;
}

}  // namespace gpupool::cli
