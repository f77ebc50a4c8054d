// bulkhead_bench [--json FILE] [NAME...]: runs the named benches, or all, and prints ratios.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "tests/bench/record.h"

int main(int argc, char** argv) {
    using namespace bulkhead::bench;
    std::vector<std::string> names;
    std::string json_file;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--json" && i + 1 < argc)
            json_file = argv[++i];
        else if (argument.starts_with("--")) {
            std::fprintf(stderr, "usage: %s [--json FILE] [NAME...]; the names are:\n", argv[0]);
            for (const Bench* bench : benches())
                std::fprintf(stderr, "  %-14s %s\n", bench->name.c_str(), bench->description.c_str());
            return argument == "--help" ? 0 : 2;
        } else
            names.push_back(argument);
    }
    for (const std::string& name : names) {
        bool known = false;
        for (const Bench* bench : benches()) known = known || bench->name == name;
        if (!known) {
            std::fprintf(stderr, "error: no bench \"%s\"; --help lists them\n", name.c_str());
            return 2;
        }
    }
    Records all;
    int status = 0;
    for (const Bench* bench : benches()) {
        if (!names.empty() && std::find(names.begin(), names.end(), bench->name) == names.end()) continue;
        std::printf("%s: %s\n", bench->name.c_str(), bench->description.c_str());
        try {
            const Records records = bench->run();
            if (bench->prints == Bench::Prints::records) print(records);
            all.insert(all.end(), records.begin(), records.end());
        } catch (const std::exception& failed) {  // the others have nothing to do with it
            std::printf("  ended: %s\n", failed.what());
            status = 1;
        }
        std::fflush(stdout);
    }
    if (!json_file.empty()) write_json(all, json_file);
    return status;
}
