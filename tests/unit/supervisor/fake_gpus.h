#pragma once

#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/support/temporary_folder.h"

namespace bulkhead::supervisor::test {

using bulkhead::test::TemporaryFolder;

/// While it lives, NVML is the fake one of tests/fakes/nvml, and its machine is what `set` says.
class FakeGpus {
public:
    explicit FakeGpus(const std::string& machine) {
        set(machine);
        ::setenv("BULKHEAD_NVML", library().c_str(), 1);
        ::setenv("BULKHEAD_FAKE_NVML", file_.c_str(), 1);
    }
    ~FakeGpus() {
        ::unsetenv("BULKHEAD_NVML");
        ::unsetenv("BULKHEAD_FAKE_NVML");
    }
    FakeGpus(const FakeGpus&) = delete;
    FakeGpus& operator=(const FakeGpus&) = delete;

    void set(const std::string& machine) {
        // Replaced whole: a reader sees one machine or the other.
        const auto next = folder_.path() / "next";
        std::ofstream{next} << machine;
        std::filesystem::rename(next, file_);
    }
    /// Lets a driver that hangs go on.
    void remove() { std::filesystem::remove(file_); }
    static std::string library() { return BULKHEAD_BINARY_DIR "/lib/libbulkhead_fake_nvml.so"; }

private:
    TemporaryFolder folder_;
    std::filesystem::path file_ = folder_.path() / "machine";
};

}  // namespace bulkhead::supervisor::test
