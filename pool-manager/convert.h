#pragma once
// Between pool.capnp and model.h. read() checks nothing but shape; who receives from the wire checks the
// values (Pool::join, Pool::request).

#include "pool-manager/audit.h"
#include "pool-manager/model.h"
#include "pool-manager/tenants.h"
#include "pool-manager/tokens.h"
#include "schema/convert.h"
#include "schema/pool.capnp.h"

namespace gpupool::pool {

using schema::bytes;  // schema/convert.h
using schema::data;
using schema::read;
using schema::text;
using schema::write;

Server read(schema::ServerInfo::Reader from);
std::vector<DeviceReport> read(capnp::List<schema::DeviceReport>::Reader from);
WorkerVersion read(schema::WorkerVersion::Reader from);
// Of a server: as many as one may have.
std::vector<WorkerVersion> read(capnp::List<schema::WorkerVersion>::Reader from);
LeaseRequest read(schema::LeaseRequest::Reader from);
Lease read(schema::Lease::Reader from);
HeldLease read(schema::HeldLease::Reader from);
SuspendResult read(schema::SuspendResult::Reader from);
MigrateResult read(schema::MigrateResult::Reader from);
CheckpointResult read(schema::CheckpointResult::Reader from);
MoveTarget read(schema::MoveTarget::Reader from);
SuspendedLease read(schema::SuspendedLease::Reader from);
Adopter read(schema::Adopter::Reader from);
TurnTerms read(schema::TurnTerms::Reader from);
LeaseUse read(schema::LeaseUse::Reader from);
LeaseCounts read(schema::LeaseCounts::Reader from);
LeaseTurn read(schema::LeaseTurn::Reader from);
LeaseHindrances read(schema::LeaseHindrances::Reader from);
KeptLease read(schema::KeptLease::Reader from);
std::vector<uint64_t> readKept(capnp::List<uint64_t>::Reader from);  // one a device
std::vector<LeasedDevice> readLeasedDevices(capnp::List<schema::LeasedDevice>::Reader from);
Explanation read(schema::Explanation::Reader from);
AuditEntry read(schema::AuditEntry::Reader from);
StoredToken read(schema::TokenInfo::Reader from);  // without its verifier
Quota read(schema::Quota::Reader from);
QuotaUse read(schema::QuotaUse::Reader from);
TenantUse read(schema::TenantUse::Reader from);
AuditQuery read(schema::Manager::AuditParams::Reader from);

using schema::write;
void write(const Server& from, schema::ServerInfo::Builder to);
void write(const WorkerVersion& from, schema::WorkerVersion::Builder to);
void write(const LeaseRequest& from, schema::LeaseRequest::Builder to);
void write(const SuspendResult& from, schema::SuspendResult::Builder to);
void write(const HeldLease& from, schema::HeldLease::Builder to);
void write(const MigrateResult& from, schema::MigrateResult::Builder to);
void write(const CheckpointResult& from, schema::CheckpointResult::Builder to);
void write(const MoveTarget& from, schema::MoveTarget::Builder to);
void write(const SuspendedLease& from, schema::SuspendedLease::Builder to);
void write(const Adopter& from, schema::Adopter::Builder to);
void write(const TurnTerms& from, schema::TurnTerms::Builder to);
void write(const LeaseTurn& from, schema::LeaseTurn::Builder to);
void write(const LeaseHindrances& from, schema::LeaseHindrances::Builder to);
void write(const Explanation& from, schema::Explanation::Builder to);
void write(const AuditEntry& from, schema::AuditEntry::Builder to);
void write(const StoredToken& from, schema::TokenInfo::Builder to);
void write(const Quota& from, schema::Quota::Builder to);
void write(const QuotaUse& from, schema::QuotaUse::Builder to);
void write(const TenantUse& from, schema::TenantUse::Builder to);
schema::Role wireRole(Role role);
Role readRole(schema::Role role);  // throws std::invalid_argument for another version's
enum class Secrets { leaveOut, include };
void write(const Lease& from, schema::Lease::Builder to, Secrets secrets);

}  // namespace gpupool::pool
