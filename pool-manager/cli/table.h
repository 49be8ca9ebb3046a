#pragma once
// Prints a table to stdout.

#include <string>
#include <vector>

namespace gpupool::cli {

// Columns as wide as their widest cell; the last one free. rows[0] is the heading.
void printTable(const std::vector<std::vector<std::string>>& rows, size_t indent = 0);

}  // namespace gpupool::cli
