#pragma once
// Where a lease is to go, as the tool's --to names it.

#include <string>

#include "pool-manager/model.h"

namespace gpupool::cli {

// "1", "0,1", "node8", "node8:1"; "": nowhere else. Throws options::OptionError.
pool::MoveTarget readTarget(const std::string& text);

}  // namespace gpupool::cli
