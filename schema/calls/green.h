// Green contexts (Green Contexts), and the session's calls behind them (schema/session_calls.h).
// Rows: see schema/rows.h. No include guard: included once per meaning of CALL.
// clang-format off
CALL(cuDeviceGetDevResource, Policy, None)
CALL(cuCtxGetDevResource, Policy, None)
CALL(cuGreenCtxGetDevResource, Policy, None)
CALL(cuDevSmResourceSplitByCount, Policy, None)
CALL(cuDevResourceGenerateDesc, Local, None)
CALL(cuGreenCtxCreate, Policy, None)
CALL(cuGreenCtxDestroy, Policy | Cleanup, Checked, Frees<"hCtx">)
CALL(cuCtxFromGreenCtx, Local, None)
CALL(cuGreenCtxGetId, Local, None)
CALL(cuGreenCtxStreamCreate, Policy, Checked, Mints<"phStream">, Handle<"greenCtx">, In<"flags">, In<"priority">)
CALL(cuStreamGetGreenCtx, Local, None)
CALL(cuGreenCtxRecordEvent, Policy, None)
CALL(cuGreenCtxWaitEvent, Policy, None)
SESSION_CALL(sessionSmResource, Await, Checked, Struct<"source">, In<"type">, Out<"sm">)
SESSION_CALL(sessionSmSplit, Await, Checked, Struct<"source">, In<"simulate">, OutArray<"groups", "count">, InOut<"count">, Out<"rest">)
SESSION_CALL(sessionGreenCreate, Await, Checked, Mints<"green">, Device<"device">, Array<"parts", "count">, In<"count">, In<"flags">)
// clang-format on
