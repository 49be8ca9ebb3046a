#include "pool-manager/rest/openapi.h"

#include "pool-manager/lease_state.h"

namespace gpupool::pool::rest {
namespace {

// JSON Schema 2020-12. Members that are not named here may be added by a later version.
const char kSchemas[] = R"json({
  "Health": {"type": "object", "required": ["status", "version"], "properties": {
    "status": {"const": "ok"}, "version": {"type": "string"}}},
  "Self": {"type": "object", "required": ["role", "tenant", "tokens", "allTenants", "may"], "properties": {
    "role": {"enum": ["viewer", "user", "scheduler", "server", "operator"]}, "tenant": {"type": "string"},
    "tokens": {"type": "boolean"}, "allTenants": {"type": "boolean"},
    "may": {"type": "array", "items": {"enum": ["look", "see_quotas", "see_tenants", "lease", "change_lease", "drop_lost", "cordon",
                                                "set_quota", "tokens"]}}}},
  "OpenApi": {"type": "object", "required": ["openapi", "info", "paths", "components"], "properties": {
    "openapi": {"const": "3.1.0"}, "info": {"type": "object"}, "paths": {"type": "object"},
    "components": {"type": "object"}}},
  "Id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
  "Bytes": {"type": "integer", "minimum": 0},
  "Device": {"type": "object",
    "required": ["ordinal", "name", "uuid", "memoryBytes", "computeCapability", "pciBusId", "software", "healthy",
                 "problem", "driverVersion"],
    "properties": {
      "ordinal": {"type": "integer", "minimum": 0, "maximum": 63},
      "name": {"type": "string"},
      "uuid": {"type": "string", "pattern": "^GPU-"},
      "memoryBytes": {"$ref": "#/components/schemas/Bytes"},
      "computeCapability": {"type": "string"},
      "pciBusId": {"type": "string"},
      "software": {"type": "boolean"},
      "healthy": {"type": "boolean"},
      "problem": {"type": "string"},
      "driverVersion": {"type": "integer"}}},
  "Sample": {"type": "object", "required": ["ageMs", "lastXid"], "properties": {
    "ageMs": {"type": "integer", "minimum": 0},
    "lastXid": {"type": "integer", "minimum": 0},
    "gpuPercent": {"type": "integer", "minimum": 0},
    "memoryPercent": {"type": "integer", "minimum": 0},
    "usedBytes": {"$ref": "#/components/schemas/Bytes"},
    "totalBytes": {"$ref": "#/components/schemas/Bytes"},
    "temperatureC": {"type": "integer"},
    "powerMilliwatts": {"type": "integer", "minimum": 0},
    "powerLimitMilliwatts": {"type": "integer", "minimum": 0},
    "smMegahertz": {"type": "integer", "minimum": 0},
    "memoryMegahertz": {"type": "integer", "minimum": 0},
    "uncorrectedEccErrors": {"type": "integer", "minimum": 0},
    "nvlinksUp": {"type": "integer", "minimum": 0}}},
  "ListedDevice": {"allOf": [{"$ref": "#/components/schemas/Device"}], "type": "object",
    "required": ["server", "freeBytes", "leases", "cordoned", "suspended"],
    "properties": {
      "server": {"type": "string"},
      "freeBytes": {"$ref": "#/components/schemas/Bytes"},
      "leases": {"type": "array", "items": {"$ref": "#/components/schemas/Id"}},
      "suspended": {"type": "array", "items": {"$ref": "#/components/schemas/Id"}},
      "cordoned": {"type": "boolean"},
      "sample": {"$ref": "#/components/schemas/Sample"},
      "leasableBytes": {"$ref": "#/components/schemas/Bytes"},
      "leasedBytes": {"$ref": "#/components/schemas/Bytes"},
      "turns": {"type": "object", "additionalProperties": {"enum": ["resident", "aside", "waiting", "unknown"]}}}},
  "DeviceList": {"type": "object", "required": ["devices"], "properties": {
    "devices": {"type": "array", "items": {"$ref": "#/components/schemas/ListedDevice"}}}},
  "Server": {"type": "object",
    "required": ["name", "alive", "cordoned", "cordonReason", "cordonedBy", "cordonedSeconds", "absent", "lastBeatMs",
                 "warmWorkers", "pid", "localPath", "address", "rowsHash", "workers", "devices", "leftOut", "walls",
                 "missingWalls",
                 "fabric"],
    "properties": {
      "name": {"type": "string"},
      "alive": {"type": "boolean"},
      "absent": {"type": "boolean"},
      "cordoned": {"type": "boolean"},
      "cordonReason": {"type": "string"},
      "cordonedBy": {"type": "string"},
      "cordonedSeconds": {"type": "integer", "minimum": 0},
      "lastBeatMs": {"type": "integer", "minimum": 0},
      "warmWorkers": {"type": "integer", "minimum": 0},
      "pid": {"type": "integer", "minimum": 0},
      "localPath": {"type": "string"},
      "address": {"type": "string"},
      "rowsHash": {"type": "integer", "minimum": 0},
      "workers": {"type": "array", "items": {"type": "object", "required": ["rowsHash", "release"], "properties": {
        "rowsHash": {"type": "integer", "minimum": 0}, "release": {"type": "string"}}}},
      "overcommitPercent": {"type": "integer", "minimum": 100},
      "devices": {"type": "array", "items": {"$ref": "#/components/schemas/Device"}},
      "leftOut": {"type": "array", "items": {"type": "string"}},
      "walls": {"type": "array", "items": {"type": "string"}},
      "missingWalls": {"type": "array", "items": {"type": "string"}},
      "fabric": {"type": "object", "required": ["note", "devices"], "properties": {
        "note": {"type": "string"}, "devices": {"type": "array", "items": {"type": "object"}},
        "nvlinks": {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}}}}}},
  "ServerList": {"type": "object", "required": ["servers"], "properties": {
    "servers": {"type": "array", "items": {"$ref": "#/components/schemas/Server"}}}},
  "Lease": {"type": "object",
    "required": ["id", "server", "devices", "ttlMs", "state", "ageMs", "tenant", "holder"],
    "properties": {
      "id": {"$ref": "#/components/schemas/Id"},
      "server": {"type": "string"},
      "devices": {"type": "array", "items": {"type": "object", "required": ["ordinal", "uuid", "memoryBytes"],
        "properties": {"ordinal": {"type": "integer"}, "uuid": {"type": "string"},
                       "memoryBytes": {"$ref": "#/components/schemas/Bytes"}}}},
      "ttlMs": {"type": "integer", "minimum": 0},
      "state": {"$ref": "#/components/schemas/LeaseState"},
      "ageMs": {"type": "integer", "minimum": 0},
      "tenant": {"type": "string"},
      "holder": {"type": "string"},
      "movesTo": {"type": "string"},
      "hindrances": {"type": "array", "items": {"type": "string"}},
      "protection": {"type": "array", "items": {"type": "string"}},
      "protectMs": {"type": "integer", "minimum": 1},
      "standby": {"type": "string"},
      "reason": {"type": "string"}, "endsInMs": {"type": "integer", "minimum": 1},
      "claim": {"type": "object", "required": ["job", "usedBy"], "properties": {
        "job": {"type": "string"}, "usedBy": {"type": "array", "items": {"type": "string"}}}},
      "why": {"type": "string"}, "idleMs": {"type": "integer", "minimum": 0},
      "idleReleaseMs": {"type": "integer", "minimum": 1}, "position": {"type": "integer", "minimum": 1},
      "resumes": {"type": "boolean"}, "priority": {"enum": ["low", "normal", "high"]},
      "held": {"type": "object", "required": ["folder", "server"], "properties": {
        "folder": {"type": "string"}, "server": {"type": "string"}}},
      "terms": {"type": "object", "required": ["sharePercent", "priority"], "properties": {
        "sharePercent": {"type": "integer", "minimum": 0, "maximum": 100}, "priority": {"type": "string"}}},
      "turn": {"type": "object", "required": ["place", "servedMs", "turns", "note"], "properties": {
        "place": {"type": "string"}, "servedMs": {"type": "integer"}, "turns": {"type": "integer"},
        "note": {"type": "string"}}}}},
  "LeaseList": {"type": "object", "required": ["leases"], "properties": {
    "leases": {"type": "array", "items": {"$ref": "#/components/schemas/Lease"}},
    "nextCursor": {"$ref": "#/components/schemas/Id"}}},
  "Renewal": {"type": "object", "required": ["id", "ttlMs"], "properties": {
    "id": {"$ref": "#/components/schemas/Id"}, "ttlMs": {"type": "integer", "minimum": 0},
    "notice": {"type": "string"}, "endsInMs": {"type": "integer", "minimum": 0}}},
  "Queue": {"type": "object", "required": ["queue"], "properties": {
    "queue": {"type": "array", "items": {"$ref": "#/components/schemas/Lease"}}}},
  "Explanation": {"type": "object", "required": ["outlook", "text", "ahead", "servers"], "properties": {
    "outlook": {"enum": ["now", "devices", "queue", "server", "operator", "quota", "never"]},
    "text": {"type": "string"}, "ahead": {"type": "integer", "minimum": 0},
    "servers": {"type": "array", "items": {"type": "object", "required": ["name", "reason", "devices"], "properties": {
      "name": {"type": "string"}, "reason": {"type": "string"},
      "devices": {"type": "array", "items": {"type": "object", "required": ["ordinal", "name", "fits", "reason"],
        "properties": {"ordinal": {"type": "integer"}, "name": {"type": "string"}, "fits": {"type": "boolean"},
                       "reason": {"type": "string"}}}}}}}}},
  "AuditList": {"type": "object", "required": ["entries", "more"], "properties": {
    "more": {"type": "boolean"},
    "entries": {"type": "array", "items": {"type": "object",
      "required": ["number", "timeMs", "event", "lease", "where", "tenant", "holder", "by", "reason"], "properties": {
        "number": {"type": "integer", "minimum": 1}, "timeMs": {"type": "integer", "minimum": 0},
        "event": {"type": "string"}, "lease": {"type": "string"}, "where": {"type": "string"},
        "tenant": {"type": "string"}, "holder": {"type": "string"}, "by": {"type": "string"},
        "reason": {"type": "string"}}}}}},
  "Drain": {"type": "object", "required": ["name", "cordoned", "drained", "pending", "leases"], "properties": {
    "name": {"type": "string"}, "cordoned": {"const": true}, "drained": {"type": "boolean"},
    "pending": {"type": "boolean"},
    "leases": {"type": "array", "items": {"type": "object", "required": ["id", "state", "note"], "properties": {
      "id": {"$ref": "#/components/schemas/Id"}, "state": {"$ref": "#/components/schemas/LeaseState"},
      "note": {"type": "string"}}}}}},
  "ClaimList": {"type": "object", "required": ["claims"], "properties": {
    "claims": {"type": "array", "items": {"$ref": "#/components/schemas/Lease"}}}},
  "ClaimEnd": {"type": "object", "required": ["claim", "state"], "properties": {
    "claim": {"type": "string"}, "state": {"const": "ended"}}},
  "LeaseChange": {"type": "object", "required": ["id", "state", "reason"], "properties": {
    "id": {"$ref": "#/components/schemas/Id"},
    "state": {"anyOf": [{"$ref": "#/components/schemas/LeaseState"}, {"const": "ended"}]},
    "reason": {"type": "string"},
    "pending": {"type": "boolean"},
    "keptBytes": {"type": "array", "items": {"$ref": "#/components/schemas/Bytes"}},
    "movedBytes": {"$ref": "#/components/schemas/Bytes"},
    "drainMs": {"type": "integer", "minimum": 0},
    "moveMs": {"type": "integer", "minimum": 0},
    "sessions": {"type": "integer", "minimum": 0},
    "longestPauseMs": {"type": "integer", "minimum": 0},
    "place": {"type": "string"}}},
  "ServerChange": {"type": "object", "required": ["name", "cordoned"], "properties": {
    "name": {"type": "string"}, "cordoned": {"type": "boolean"}}},
  "Seconds": {"type": "integer", "minimum": 0},
  "TokenId": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
  "Token": {"type": "object",
    "required": ["id", "tenant", "name", "role", "createdS", "expiresS", "lastUsedS", "revokedS", "createdBy"],
    "properties": {
      "id": {"$ref": "#/components/schemas/TokenId"},
      "tenant": {"type": "string"},
      "name": {"type": "string"},
      "role": {"enum": ["viewer", "user", "scheduler", "server", "operator"]},
      "createdS": {"$ref": "#/components/schemas/Seconds"},
      "expiresS": {"$ref": "#/components/schemas/Seconds"},
      "lastUsedS": {"$ref": "#/components/schemas/Seconds"},
      "revokedS": {"$ref": "#/components/schemas/Seconds"},
      "createdBy": {"type": "string"}}},
  "NewToken": {"allOf": [{"$ref": "#/components/schemas/Token"}], "type": "object", "required": ["token", "certificates"],
    "properties": {"token": {"type": "string"}, "certificates": {"type": "array", "items": {"type": "string"}}}},
  "TokenList": {"type": "object", "required": ["tokens"], "properties": {
    "tokens": {"type": "array", "items": {"$ref": "#/components/schemas/Token"}}}},
  "Quota": {"type": "object", "required": ["tenant", "milliDevices", "memoryBytes", "deviceSeconds", "per", "protectMs"],
    "properties": {
      "tenant": {"type": "string"},
      "milliDevices": {"type": "integer", "minimum": 0},
      "memoryBytes": {"$ref": "#/components/schemas/Bytes"},
      "deviceSeconds": {"$ref": "#/components/schemas/Seconds"},
      "per": {"enum": ["day", "week", "month"]},
      "protectMs": {"type": "integer", "minimum": 0}}},
  "QuotaUse": {"type": "object",
    "required": ["tenant", "quota", "milliDevices", "memoryBytes", "deviceSeconds", "windowEndsS"],
    "properties": {
      "tenant": {"type": "string"},
      "quota": {"$ref": "#/components/schemas/Quota"},
      "milliDevices": {"type": "integer", "minimum": 0},
      "memoryBytes": {"$ref": "#/components/schemas/Bytes"},
      "deviceSeconds": {"$ref": "#/components/schemas/Seconds"},
      "windowEndsS": {"$ref": "#/components/schemas/Seconds"}}},
  "QuotaList": {"type": "object", "required": ["quotas"], "properties": {
    "quotas": {"type": "array", "items": {"$ref": "#/components/schemas/QuotaUse"}}}},
  "Tenant": {"allOf": [{"$ref": "#/components/schemas/QuotaUse"}], "type": "object",
    "required": ["tokens", "leases", "claims", "queued", "usageDeviceSeconds"],
    "properties": {
      "tokens": {"type": "integer", "minimum": 0},
      "leases": {"type": "object", "propertyNames": {"$ref": "#/components/schemas/LeaseState"},
                 "additionalProperties": {"type": "integer", "minimum": 1}},
      "claims": {"type": "integer", "minimum": 0},
      "queued": {"type": "integer", "minimum": 0},
      "usageDeviceSeconds": {"type": "number", "minimum": 0}}},
  "TenantList": {"type": "object", "required": ["tenants"], "properties": {
    "tenants": {"type": "array", "items": {"$ref": "#/components/schemas/Tenant"}}}},
  "Error": {"type": "object", "required": ["error"], "properties": {
    "error": {"type": "object", "required": ["code", "message", "hint"], "additionalProperties": false,
      "properties": {"code": {"type": "string", "pattern": "^[a-z_]+$"}, "message": {"type": "string"},
                     "hint": {"type": "string", "minLength": 1}}}}}
})json";

Json reference(const char* schema) { return {{"$ref", std::string("#/components/schemas/") + schema}}; }

Json schemaOf(const Field& field) {
  switch (field.kind) {
    case Field::Kind::count:
      return {
          {"type", "integer"}, {"minimum", field.least}, {"maximum", field.most}, {"default", field.usual}};
    case Field::Kind::yes:
      return {{"type", "boolean"}, {"default", false}};
    case Field::Kind::ordinals:
      return {{"type", "array"},
              {"maxItems", field.most},
              {"items", {{"type", "integer"}, {"minimum", 0}, {"maximum", kMaxDevices - 1}}}};
    case Field::Kind::state:
      return reference("LeaseState");
    case Field::Kind::digits:
      return {{"type", "string"}, {"pattern", "^[0-9a-f]*$"}, {"maxLength", field.most}};
    case Field::Kind::text:
      break;
  }
  return {{"type", "string"}, {"maxLength", field.most}};
}

Json parameter(const char* name, const char* in, const char* what, bool required, Json schema) {
  return {{"name", name},
          {"in", in},
          {"description", what},
          {"required", required},
          {"schema", std::move(schema)}};
}

Json parametersOf(const Route& route) {
  Json list = Json::array();
  const std::string path = route.path;
  if (path.find("{id}") != std::string::npos)
    list.push_back(parameter("id", "path", "The lease's id, in full.", true, reference("Id")));
  if (path.find("{claim}") != std::string::npos)
    list.push_back(
        parameter("claim", "path", "The claim's id, in full, or its job.", true, {{"type", "string"}}));
  if (path.find("{token}") != std::string::npos)
    list.push_back(parameter("token", "path", "The token's id, in full.", true, reference("TokenId")));
  if (path.find("{tenant}") != std::string::npos)
    list.push_back(parameter("tenant", "path", "The tenant's name.", true, {{"type", "string"}}));
  if (path.find("{name}") != std::string::npos)
    list.push_back(parameter("name", "path", "The server's name.", true, {{"type", "string"}}));
  if (route.method == kj::HttpMethod::GET)
    for (const Field& field : route.fields)
      list.push_back(parameter(field.name, "query", field.what, false, schemaOf(field)));
  return list;
}

Json bodyOf(const Route& route) {
  Json properties = Json::object();
  for (const Field& field : route.fields) {
    properties[field.name] = schemaOf(field);
    properties[field.name]["description"] = field.what;
  }
  return {
      {"required", false},
      {"content",
       {{"application/json",
         {{"schema", {{"type", "object"}, {"additionalProperties", false}, {"properties", properties}}}}}}}};
}

Json operationOf(const Route& route) {
  const Json schema = route.schema == nullptr ? Json{{"type", "string"}} : reference(route.schema);
  const std::string type = std::string(route.contentType).substr(0, std::string(route.contentType).find(';'));
  Json operation = {{"operationId", route.name},
                    {"summary", route.summary},
                    {"parameters", parametersOf(route)},
                    {"responses",
                     {{"200", {{"description", "It is so."}, {"content", {{type, {{"schema", schema}}}}}}},
                      {"default",
                       {{"description", "It is not, and why."},
                        {"content", {{"application/json", {{"schema", reference("Error")}}}}}}}}}};
  if (route.method == kj::HttpMethod::POST) {
    operation["requestBody"] = bodyOf(route);
    operation["responses"]["202"] = {{"description", "It goes on: ask for the lease again."},
                                     {"content", {{type, {{"schema", schema}}}}}};
  }
  operation["security"] =
      route.open ? Json::array() : Json::array({{{"token", Json::array()}}, Json::object()});
  return operation;
}

Json makeDocument() {
  Json paths = Json::object();
  for (const Route& route : routes())
    paths[route.path][route.method == kj::HttpMethod::GET ? "get" : "post"] = operationOf(route);
  Json schemas = Json::parse(kSchemas);
  Json states = Json::array();
  for (uint32_t i = 0; i < kLeaseStates; ++i) states.push_back(name(static_cast<LeaseState>(i)));
  schemas["LeaseState"] = {{"enum", states}};
  return {
      {"openapi", "3.1.0"},
      {"info",
       {{"title", "gpupool"},
        {"version", GPUPOOL_VERSION},
        {"description", "The pool manager's REST interface. A token is needed where the manager has any."}}},
      {"paths", paths},
      {"components",
       {{"schemas", schemas}, {"securitySchemes", {{"token", {{"type", "http"}, {"scheme", "bearer"}}}}}}}};
}

}  // namespace

kj::Promise<Answer> openapi(const Context&, const Request&) {
  static const Json document = makeDocument();
  return Answer{200, document};
}

}  // namespace gpupool::pool::rest
