#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "clients/cli/commands/command.h"

namespace bulkhead::cli {

/// One run of the whole program, in this process.
struct Ran {
    int status;
    std::string out;
    std::string err;
};

inline Ran ran(std::vector<const char*> words) {
    words.insert(words.begin(), "bulkhead");
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    const int status = run(static_cast<int>(words.size()), words.data());
    return {status, testing::internal::GetCapturedStdout(), testing::internal::GetCapturedStderr()};
}

}  // namespace bulkhead::cli
