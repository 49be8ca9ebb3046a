// Compiles nothing: the target of this name lends the tests its precompiled header.
