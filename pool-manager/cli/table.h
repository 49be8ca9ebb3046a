#pragma once
// Tables for people.

#include <iostream>
#include <string>
#include <vector>

#include "pool-manager/listing.h"
#include "pool-manager/quotas.h"

namespace gpupool::cli {

// Columns as wide as their widest cell; the last one free. rows[0] is the heading.
void printTable(const std::vector<std::vector<std::string>>& rows, size_t indent = 0,
                std::ostream& out = std::cout);

// The table of `gpupool devices`.
std::vector<std::vector<std::string>> deviceRows(const std::vector<pool::ListedDevice>& devices,
                                                 const pool::PoolView& view, bool verbose);

// What a tenant has of its quota, in the tables of `gpupool quota list` and `gpupool tenants`.
std::vector<std::string> quotaHeading();
std::vector<std::string> quotaCells(const pool::QuotaUse& use);
std::string protectCell(const pool::QuotaUse& use);  // "30s", "-"
std::string hoursText(double deviceSeconds);         // GPU-hours

// The table of `gpupool leases`.
std::vector<std::string> leaseHeading(bool verbose);
std::vector<std::string> leaseRow(const pool::Lease& lease, bool verbose);

}  // namespace gpupool::cli
