#pragma once
// Tables on stdout.

#include <string>
#include <vector>

#include "pool-manager/model.h"

namespace gpupool::cli {

// Columns as wide as their widest cell; the last one free. rows[0] is the heading.
void printTable(const std::vector<std::vector<std::string>>& rows, size_t indent = 0);

// The table of `gpupool leases`.
std::vector<std::string> leaseHeading(bool verbose);
std::vector<std::string> leaseRow(const pool::Lease& lease, bool verbose);

}  // namespace gpupool::cli
