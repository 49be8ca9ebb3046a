#pragma once
// Between pool.capnp and model.h. read() checks nothing but shape; who receives from the wire checks the
// values (Pool::join, Pool::request).

#include "pool-manager/model.h"
#include "schema/convert.h"

namespace gpupool::pool {

using schema::read;  // schema/convert.h
using schema::write;

Device read(schema::DeviceInfo::Reader from);
Server read(schema::ServerInfo::Reader from);
std::vector<DeviceReport> read(capnp::List<schema::DeviceReport>::Reader from);
LeaseRequest read(schema::LeaseRequest::Reader from);
Lease read(schema::Lease::Reader from);
std::vector<LeasedDevice> readLeasedDevices(capnp::List<schema::LeasedDevice>::Reader from);

void write(const Device& from, schema::DeviceInfo::Builder to);
void write(const Server& from, schema::ServerInfo::Builder to);
void write(const LeasedDevice& from, schema::LeasedDevice::Builder to);
void write(const LeaseRequest& from, schema::LeaseRequest::Builder to);
enum class Secrets { leaveOut, include };
void write(const Lease& from, schema::Lease::Builder to, Secrets secrets);

inline std::string text(capnp::Text::Reader from) { return {from.begin(), from.size()}; }
inline std::string bytes(capnp::Data::Reader from) {
  return {reinterpret_cast<const char*>(from.begin()), from.size()};
}
inline capnp::Data::Reader data(const std::string& from) {
  return {reinterpret_cast<const unsigned char*>(from.data()), from.size()};
}

}  // namespace gpupool::pool
