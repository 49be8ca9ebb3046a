#pragma once
// From the options of `run` and `hold` to what a Holder needs.

#include "pool-manager/cli/client_options.h"
#include "pool-manager/cli/holder.h"

namespace gpupool::cli {

// The options of ClientOptions that leasing commands take.
std::vector<std::string> leaseOptionNames();
// "25%" or "25"; "": 0, no share is named. Both throw options::OptionError for anything else.
uint32_t parseShare(const std::string& text);
pool::Priority parsePriority(const std::string& text);
// Throws options::OptionError for values that no manager would take.
HolderSettings leaseWish(const ClientOptions& options);

}  // namespace gpupool::cli
