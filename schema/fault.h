#pragma once
// Errors that the other side must tell apart. KJ's exceptions carry one of four types and a text, in a
// process and over RPC, and nothing else. Where the receiver has to know more, the text begins with a code,
// which only these functions write and read.

#include <kj/exception.h>

#include <cstdint>
#include <string>

namespace gpupool::schema {

enum class FaultKind : uint32_t {
  other,    // the exception says no more than its type
  token,    // a login was refused: the token, or the way it was given, is at fault
  version,  // the two sides are of different versions
  open,     // a session was not opened; code is a holder::Status
};

struct Fault {
  FaultKind kind = FaultKind::other;
  uint32_t code = 0;
  std::string text;     // for people, as it was thrown
  bool remote = false;  // thrown on the other side of an RPC connection
};

kj::Exception faultException(FaultKind kind, const std::string& text, uint32_t code = 0);
Fault faultOf(const kj::Exception& error);

// For people: without what KJ writes around what happened (the call that failed, its condition, its values).
std::string plainText(const kj::Exception& error);

}  // namespace gpupool::schema
