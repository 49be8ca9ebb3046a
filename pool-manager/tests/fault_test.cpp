// Errors that another process must tell apart (schema/fault.h).

#include "schema/fault.h"

#include "catch.h"
#include "pool-manager/cli/session_opener.h"
#include "pool-manager/rpc.h"

using namespace gpupool;
using schema::Fault;
using schema::FaultKind;

namespace {

kj::Exception plain(const char* text) {
  return kj::Exception(kj::Exception::Type::FAILED, "", 0, kj::heapString(text));
}

}  // namespace

TEST_CASE("a fault keeps its kind, code and text") {
  const Fault fault = schema::faultOf(schema::faultException(FaultKind::open, "7:no: room", 12));
  CHECK(fault.kind == FaultKind::open);
  CHECK(fault.code == 12);
  CHECK(fault.text == "7:no: room");
  CHECK_FALSE(fault.remote);
}

TEST_CASE("and does so over RPC, which puts words before it") {
  const kj::Exception thrown = schema::faultException(FaultKind::token, "the token is wrong");
  const std::string carried = std::string("remote exception: ") + thrown.getDescription().cStr();
  const Fault fault = schema::faultOf(plain(carried.c_str()));
  CHECK(fault.kind == FaultKind::token);
  CHECK(fault.text == "the token is wrong");
  CHECK(fault.remote);
  CHECK(pool::errorText(plain(carried.c_str())) == "the token is wrong");
}

TEST_CASE("people read what happened, and not what KJ writes around it") {
  const auto reads = [](const char* thrown) { return schema::plainText(plain(thrown)); };
  CHECK(reads("std::exception: token file /a: others may read it") == "token file /a: others may read it");
  CHECK(reads("::bind(sockfd, &addr.generic, addrlen): Address already in use; toString() = 127.0.0.1:1") ==
        "Address already in use");
  CHECK(reads("expected port < 65536 [70000 < 65536]; Port number too large.") == "Port number too large.");
  CHECK(reads("DNS lookup failed.; host = x; gai_strerror(status) = Name or service not known") ==
        "the name was not found: Name or service not known");
  CHECK(reads("expected nothing") == "expected nothing");
}

TEST_CASE("other exceptions are no faults") {
  for (const char* text : {"", "token: wrong", "gpupool-fault:", "gpupool-fault:1", "gpupool-fault:1:2",
                           "gpupool-fault:99:0:text", "gpupool-fault:x:0:text", "gpupool-fault:-1:0:text"}) {
    const Fault fault = schema::faultOf(plain(text));
    CHECK(fault.kind == FaultKind::other);
    CHECK(fault.text == text);
  }
}

TEST_CASE("why a session did not open is the opener's own word, not a peer's") {
  const kj::Exception mine = cli::toException({holder::Status::mismatch, "versions differ"});
  CHECK(cli::toFailure(mine).status == holder::Status::mismatch);
  CHECK(cli::toFailure(mine).text == "versions differ");
  const std::string theirs = std::string("remote exception: ") + mine.getDescription().cStr();
  CHECK(cli::toFailure(plain(theirs.c_str())).status == holder::Status::internal);
}
