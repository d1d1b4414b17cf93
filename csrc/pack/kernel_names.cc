#include "pack/kernel_names.h"

namespace kvxfer {

std::vector<std::string> gpu_kernel_names() {
  std::vector<std::string> names = {"kvxfer_finish_chunks", "kvxfer_check_chunks",
                                    "kvxfer_put_raw_rows",  "kvxfer_digest_raw16",
                                    "kvxfer_digest_raw4",   "kvxfer_digest_raw1"};
  for (const std::string verb : {"kvxfer_pack_", "kvxfer_unpack_"}) {
    names.push_back(verb + "panels");
    for (const std::string width : {"raw16", "raw4", "raw1"}) {
      names.push_back(verb + width);
      names.push_back(verb + width + "_no_digest");
    }
    for (const std::string scheme : {"e4m3", "e5m2", "int8"}) {
      for (const std::string element : {"_bfloat16_", "_float16_"}) {
        for (const char* content : {"64", "128", "256", "576"}) {
          names.push_back(verb + scheme + element + content);
        }
      }
    }
  }
  return names;
}

}  // namespace kvxfer
