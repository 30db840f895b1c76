package image

import ("testing";"context";"fmt";"time")

func TestTry(t *testing.T){
 s,err:=Open(Options{Log:func(l string){fmt.Println(time.Now().Format("15:04:05"),"rig:",l)}})
 if err!=nil{t.Fatal(err)}
 tl,err:=s.Tools(context.Background())
 if err!=nil{t.Fatal(err)}
 fmt.Println(tl.Root())
}
